"""Regressions of memory, seeded into a model on a simulated card: each is caught, and its module named."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers import a_result, a_trial
from torch import nn
from zoo import Gpt, language_model

import oomprobe
from oomprobe.records.patience import Patience
from oomprobe.records.trials import Phase
from oomprobe.results.compare import grown, stated_tolerance

GIB, MIB = 2**30, 2**20


def checked(change=lambda model: None):
    model = Gpt(2, context=64, vocabulary=1000)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    change(model)
    options = {
        "device": "sim:24GiB",
        "breakdown": True,
        "progress": "off",
        "patience": Patience(look_calls=8),
    }
    return oomprobe.check(
        *language_model(model, torch.optim.AdamW(model.parameters())), 128, **options
    )


before_it = cache(checked)


@pytest.fixture
def before():  # within a test, where workspaces are those of one version
    return before_it()


class Keeping(nn.Module):
    """Keeps what it wraps returns for backward, and as much again."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        x = self.inner(x)
        return x * x.sigmoid()


def replaced(name, make):
    def change(model):
        for place in (
            [f"blocks.{number}.{name}" for number in range(2)]
            if name in dir(model.blocks[0])
            else [name]
        ):
            parent, _, last = place.rpartition(".")
            setattr(model.get_submodule(parent), last, make(model.get_submodule(place)))

    return change


def wider(model):
    for block in model.blocks:
        block.linear1, block.linear2 = nn.Linear(128, 544), nn.Linear(544, 128)


SEEDED = {
    "dropout of one block": (
        lambda model: setattr(model.blocks[1].dropout1, "p", 0.1),
        "blocks.1.dropout1",
    ),
    "a little wider": (wider, "blocks.*.linear1"),
    "larger vocabulary": (replaced("tokens", lambda _: nn.Embedding(4000, 128)), "tokens"),
    "kept after a layer": (replaced("linear1", Keeping), "blocks.*.linear1"),
    "an extra head": (
        replaced("head", lambda one: nn.Sequential(nn.Linear(128, 128), nn.Tanh(), one)),
        "head",
    ),
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_regression_is_caught_and_its_module_named(before, name):
    change, module = SEEDED[name]
    told = grown(before, checked(change), 0.002)
    assert told
    assert told[0].startswith("memory grew: batch 128 allocates ")
    assert module in told[-1]


def test_repeated_runs_do_not_grow(before):
    assert before.environment["model"] == "Gpt"
    assert grown(before, checked(), 0.0) == []


def test_the_answer_and_the_memory_are_judged_by_the_tolerance():
    def found(answer, peak_bytes, **changes):
        trial = a_trial(answer, phase=Phase.CONFIRM, peak_allocated_bytes=peak_bytes)
        common = a_trial(8, peak_allocated_bytes=peak_bytes)
        return a_result(batch_size=answer, trials=(common, trial), device="card", **changes)

    before = found(100, 1000 * MIB)
    assert grown(before, found(99, 1010 * MIB), 0.01) == []
    assert grown(before, found(98, 1010 * MIB), 0.01) == [
        "the answer fell: 98, 2.0 % less than 100"
    ]
    assert grown(before, found(200, 1011 * MIB), 0.01) == [
        "memory grew: batch 8 allocates 1011.00 MiB, 1.1 % more than 1000.00 MiB (tolerance 1 %)"
    ]
    assert (
        grown(before, found(50, 900 * MIB, options={"max_batch": 50}), 0.01) == []
    )  # another search


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"device": "another"}, "of two devices, card and another"),
        ({"environment": {"model": "Bert"}}, "of two models, Gpt and Bert"),
        (
            {"trials": (replace(a_trial(8, peak_allocated_bytes=GIB), replayed=True),)},
            "no batch size was traced in both",
        ),
    ],
)
def test_results_that_cannot_be_compared(changes, text):
    trials = (a_trial(8, peak_allocated_bytes=GIB),)
    before = a_result(batch_size=8, trials=trials, device="card", environment={"model": "Gpt"})
    with pytest.raises(oomprobe.InvalidArgumentError, match=text):
        grown(before, replace(before, **changes), 0.1)


@pytest.mark.parametrize("text", ["100%", "-1%", "two", "nan"])
def test_a_tolerance_that_is_no_fraction(text):
    with pytest.raises(oomprobe.InvalidArgumentError, match="a tolerance is a share of the memory"):
        stated_tolerance(text)
