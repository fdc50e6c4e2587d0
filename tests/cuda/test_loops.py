"""Answers to loops that strangers write live in a fresh process, and a probe leaves them as it found them."""

from pathlib import Path

import pytest
import torch
from bed import forked
from composed import PARTS, Trainer
from workers.forks import install
from zoo import peaks, runs

import oomprobe

from . import loops

FORK = {"memory": "1GiB", "limit_s": 120}
MIB = 2**20


def live(build):
    return oomprobe.find_max_batch(*build(), progress="off")


@pytest.mark.parametrize("build", loops.LOOPS, ids=lambda build: build.__name__)
def test_the_answer_lives_in_a_fresh_process(build):
    result = forked(live, build, **FORK)
    calls = 130 if build is loops.accumulates_64 else 50
    assert result.state_verified, result.notes
    assert not [note for note in result.notes if "leak" in note or "stepped" in note], result.notes
    assert forked(lambda: runs(build, result.batch_size, steps=calls, cap_bytes=result.budget_bytes), **FORK)
    failing = min(t.batch_size for t in result.trials if not t.passed and t.batch_size > result.batch_size)
    assert failing <= 1.1 * result.batch_size
    assert not forked(lambda: runs(build, failing, steps=calls, cap_bytes=result.budget_bytes), **FORK)


def test_a_trial_frees_what_it_replaces():
    """Parameters and optimizer state, as training does: its peak is that of a fresh process, to the byte."""

    def check():
        model, step = loops.densifies()
        before = [(name, p.shape) for name, p in model.named_parameters()]
        trial = oomprobe.check(model, step, 4096, progress="off").trials[-1]
        assert [(name, p.shape) for name, p in model.named_parameters()] == before
        return trial.steps, trial.peak_allocated_bytes

    steps, peak_bytes = forked(check, **FORK)
    assert peak_bytes == forked(peaks, loops.densifies, 4096, steps, **FORK)[-1][0]


def test_a_worker_ends_when_a_trial_has_replaced_a_parameter(tmp_path):
    """It has no copy of the old one, so the next trial builds anew; the answer is that of a live probe."""
    target = tmp_path / "target.py"
    target.write_text(
        f"""
import os, sys
sys.path[:0] = [{str(Path(__file__).parent.parent)!r}]
from cuda.loops import densifies as build
if __name__ != "__main__":
    with open({str(tmp_path / "built")!r}, "a") as file:
        print(os.getpid(), file=file)
"""
    )

    def isolated():
        install()
        return oomprobe.probe_target(f"{target}:build", progress="off", min_batch=4096, max_batch=16384, resolution=0.2)

    result = forked(isolated, **FORK)
    replacing = [trial for trial in result.trials if trial.passed and trial.steps >= 5]
    assert len(replacing) > 1
    assert len({*(tmp_path / "built").read_text().split()}) >= len(replacing)


COMPOSITIONS = [
    {"own optimizer", "attribute of a parameter", "replaced parameter"},
    {"own optimizer", "counter", "frozen part", "dict"},
    {"attribute of a parameter", "iterator", "slots", "frozen part"},
    {"replaced parameter", "iterator", "counter", "slots", "dict"},
    {"replaced containers", "made by the step", "inference tensor", "dict"},
    {*PARTS},
]


@pytest.mark.parametrize("parts", COMPOSITIONS, ids=lambda parts: "-".join(sorted(parts))[:40])
def test_the_answer_of_a_composed_loop_lives_for_50_calls(parts):
    def build():
        trainer = Trainer(parts, width=256, device="cuda")
        return trainer.model, trainer.step

    result = forked(live, build, **FORK)
    assert result.state_verified == ("iterator" not in parts)
    # What lies beside an iterator that has moved on comes back only at the end. So later trials begin with the parameters
    # that the first have replaced, and for the calls that replace them there is only the margin.
    stays_replaced = {"iterator", "replaced parameter"} <= parts
    assert any("each trial went on from the last one" in note for note in result.notes) == stays_replaced
    cap_bytes = None if stays_replaced else result.budget_bytes
    assert forked(lambda: runs(build, result.batch_size, steps=50, cap_bytes=cap_bytes), **FORK)


def test_what_grows_is_named_by_its_path():
    """Gradients per sample that are collected on the parameters, and losses with their graph."""

    def build():
        model, step = loops.gradients_per_sample()
        losses = []

        def collecting(model, batch_size):
            step(model, batch_size)
            weight = model[0].weight
            weight.collected = [*getattr(weight, "collected", []), weight.grad_sample]
            losses.append(model(torch.ones(1, loops.WIDTH, device="cuda")).sum())

        return model, collecting

    def probe():
        with pytest.raises(oomprobe.UnreliableError) as raised:
            oomprobe.check(*build(), 8, progress="off")
        return str(raised.value)

    text = forked(probe, **FORK)
    assert "model.0.weight.collected (" in text
    assert "MiB)" in text


def test_an_attribute_of_a_parameter_is_no_leak_between_trials():
    result = forked(live, loops.gradients_per_sample, **FORK)
    assert not any(trial.leaked_bytes for trial in result.trials)
