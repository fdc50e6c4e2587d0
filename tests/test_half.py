"""Half of an answer that memory does not limit runs too: a step that ignores its size is no answer."""

import pytest
import torch
from ledger import LedgerDevice, Log
from torch import nn

import oomprobe

DATA = torch.zeros(96, 64)


def model_and_optimizer():
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step_on(batch_of, *, prepared=lambda model: model, passes=lambda model, batch: model(batch)):
    """Return a model, and a step that passes it the batch of a size."""
    model, optimizer = model_and_optimizer()
    model = prepared(model)

    def step(model, batch_size):
        optimizer.zero_grad()
        passes(model, batch_of(batch_size)).square().mean().backward()
        optimizer.step()

    return model, step


def in_parts(model, batch):
    """Pass the batch in micro-batches of 8."""
    return torch.cat([model(part) for part in batch.split(8)])


def one_tensor_more(model, batch):
    return model(batch) + model(torch.zeros(3, 64)).mean()


STEPS = {
    "drawn": lambda: step_on(lambda size: torch.randn(size, 64)),
    "in parts": lambda: step_on(lambda size: torch.randn(size, 64), passes=in_parts),
    "called twice": lambda: step_on(lambda size: torch.randn(size, 64), passes=one_tensor_more),
    "tokens": lambda: step_on(lambda size: torch.randn(max(1, size // 16), 64)),
    "a length": lambda: step_on(lambda size: torch.randn(1, size, 64)),
    "of one sequence": lambda: step_on(lambda size: torch.randn(2, size, 64)),
    "padded above": lambda: step_on(lambda size: torch.randn(-(-size // 64) * 64, 64)),
    "a slice": lambda: step_on(lambda size: DATA[:size]),
    "ignored": lambda: step_on(lambda size: torch.randn(32, 64)),
    "ignored, hidden": lambda: step_on(
        lambda size: torch.randn(32, 64), passes=lambda model, batch: model[2](model[0](batch))
    ),
}
IGNORES, ENDS = "needs no more memory than batch", "the model got 96 examples where"


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("drawn", 128, None),
        ("in parts", 128, None),
        ("called twice", 128, None),
        ("tokens", 128, None),
        ("a length", 128, None),
        ("of one sequence", 128, None),
        ("padded above", 256, None),
        ("a slice", 96, None),
        ("a slice", 128, ENDS),
        ("a slice", 512, ENDS),
        ("ignored", 64, IGNORES),
        ("ignored, hidden", 64, IGNORES),
    ],
)
@pytest.mark.parametrize("ways", ["check", "max_batch", "one size"])
def test_a_size_that_is_not_used_is_no_answer(name, size, said, ways):
    model, step = STEPS[name]()
    options = {"device": "sim:1GiB", "progress": "off"}

    def probe():
        if ways == "check":
            return oomprobe.check(model, step, size, **options)
        start = size if ways == "one size" else None
        return oomprobe.find_max_batch(model, step, max_batch=size, start_batch=start, **options)

    if said is None:
        result = probe()
        assert (result.batch_size, result.trials[-1].batch_size) == (size, size)
        assert size // 2 in {trial.batch_size for trial in result.trials if not trial.replayed}
    elif ways == "max_batch" or size < 200:
        with pytest.raises(oomprobe.UnreliableError, match=said):
            probe()
    else:  # half is more than there are, too
        with pytest.raises(oomprobe.UnreliableError, match=r"\(the model got 96 examples each"):
            probe()
    assert not model._forward_pre_hooks


def test_a_step_that_pads_may_be_told_its_size():
    model, step = STEPS["ignored"]()
    limits = {"min_batch": 64, "max_batch": 64}
    result = oomprobe.find_max_batch(model, step, device="sim:1GiB", progress="off", **limits)
    assert {trial.batch_size for trial in result.trials} == {64}


def test_host_memory_is_not_counted_so_what_the_model_gets_tells():
    model, step = STEPS["ignored"]()
    options = {"device": "cpu:1GiB", "progress": "off"}
    with pytest.raises(oomprobe.UnreliableError, match=IGNORES):
        oomprobe.check(model, step, 64, **options)
    model, step = STEPS["drawn"]()
    assert oomprobe.check(model, step, 64, **options).batch_size == 64


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("prepared", "hooks"),
    [
        (lambda model: model, 1),
        (compiled_in_place, 0),
        (lambda model: torch.compile(model, backend="eager"), 0),
    ],
)
def test_what_is_compiled_gets_no_hook(prepared, hooks):
    seen = Log()

    def look_at(model, batch):
        seen.append(len(model._forward_pre_hooks))
        return batch @ torch.ones(64, 1, requires_grad=True)

    model, step = step_on(lambda size: torch.randn(size, 64), prepared=prepared, passes=look_at)
    oomprobe.check(model, step, 64, device=LedgerDevice(), progress="off")
    assert {*seen} == {hooks}


def test_a_half_that_fails_leaves_the_answer():
    model, step = step_on(lambda size: torch.randn(size, 64).view(64, -1, 64)[:, 0])
    result = oomprobe.check(model, step, 64, device="sim:1GiB", progress="off")
    (note,) = [note for note in result.notes if note.startswith("batch 32, which was to show")]
    assert "did not run: the step failed at batch size 32 with RuntimeError" in note
