"""The scripts that compare published figures with the simulation, and other tools with the last size that runs."""

import json

import calibrate
import pytest
import torch
from calibration import timm_loop
from calibration.rows import EVIDENCE
from peers import measuring


def test_a_family_has_a_script_or_names_the_last_commit_that_has_it():
    kept = {path.stem: json.loads(path.read_text()) for path in EVIDENCE.glob("*.json")}
    frozen = {name for name, family in kept.items() if "commit" in family}
    assert frozen == kept.keys() - calibrate.FAMILIES.keys()
    assert calibrate.FAMILIES.keys() < kept.keys()


def test_the_loop_of_timm_descends_as_its_benchmark_does():
    assert list(timm_loop.sizes(1024, 96)) == [1024, 768, 512, 384, 256, 192, 128, 96]
    model = torch.nn.Linear(2**18, 1)  # 1 MiB of weights, and of each sample

    def begin(model, size):
        images = []

        def step():
            images.extend([] if images else [torch.zeros(size, 2**18, device="cuda")])
            model(images[0])

        return step

    tried = timm_loop.descend(timm_loop.card_of("RTX-4090", 600), model, [768, 512], begin)
    assert [(size, fits) for size, (fits, _) in tried.items()] == [(768, False), (512, True)]
    alone = timm_loop.descend(timm_loop.card_of("RTX-4090", 1600), model, [512], begin)
    after = timm_loop.descend(timm_loop.card_of("RTX-4090", 1600), model, [768, 512], begin)
    kept = [tried[512][1].peak_reserved_bytes >> 20 for tried in (alone, after)]
    assert kept[0] < 560
    assert kept[1] > 760  # the smaller batch lies in the larger one's segment


@pytest.mark.parametrize(
    ("limit", "hole", "least"), [(1, 0, 1), (499, 0, 499), (100, 64, 100), (837632, 0, 835957)]
)
def test_the_cold_frontier_is_the_last_size_that_runs(limit, hole, least, monkeypatch):
    """Large ones are exact to 1/500; doubling continues past a single size that fails."""
    monkeypatch.setattr(measuring, "lasts", lambda _, size, steps: size <= limit and size != hole)
    assert least <= measuring.cold_frontier("mlp_adamw") <= limit
