"""The scripts that compare published figures with the simulation."""

import importlib
import json
import pkgutil

import calibrate
import calibration
import pytest
import torch
from calibration import litgpt_hub, timm_loop
from calibration.litgpt_model import NF4Linear
from calibration.rows import EVIDENCE


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(calibration.__path__)])
def test_each_script_imports(name):
    importlib.import_module(f"calibration.{name}")


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


def test_orders_of_peaks_count_what_ran_out_of_memory_as_largest():
    peaks = {"a": (100, 90), "b": (101, 50), "c": (200, 80), "d": (None, None), "e": (None, 300)}
    rows = [{"name": name, "published": low, "simulated": high} for name, (low, high) in peaks.items()]
    found = {low + high: same for low, high, same in litgpt_hub.orders(rows)}
    assert found == {"ac": False, "bc": True, **{low + high: True for low in "abc" for high in "de"}}


def test_layers_of_4_bits_keep_their_input_as_long_as_the_graph():
    layer = NF4Linear(64, 32, bias=False)
    assert sum(buffer.nbytes for buffer in layer.buffers()) == 64 * 32 // 2 + 64 * 32 // 64 * 4 + 64
    x = torch.ones(2, 64, requires_grad=True)
    result = layer(x)
    result.sum().backward()
    assert result.grad_fn.kept is x
    assert x.grad.shape == x.shape
    assert layer(x.detach()).grad_fn is None
