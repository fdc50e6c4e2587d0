"""Answers to loops that strangers write live in a fresh process, and a probe leaves them as it found them."""

from pathlib import Path

import pytest
import torch
from bed import forked
from composed import Trainer
from workers.forks import install
from zoo import runs

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
    assert not any(trial.leaked_bytes for trial in result.trials)  # nor what hangs on a parameter
    assert not [note for note in result.notes if "leak" in note or "stepped" in note], result.notes
    assert forked(
        lambda: runs(build, result.batch_size, steps=calls, cap_bytes=result.budget_bytes), **FORK
    )
    failing = min(
        t.batch_size for t in result.trials if not t.passed and t.batch_size > result.batch_size
    )
    assert failing <= 1.1 * result.batch_size
    assert not forked(
        lambda: runs(build, failing, steps=calls, cap_bytes=result.budget_bytes), **FORK
    )


def test_a_worker_ends_when_a_trial_has_replaced_a_parameter(tmp_path):
    """It has no copy of the old one, so the next trial builds anew; the answer is that of a live probe."""
    target = tmp_path / "target.py"
    target.write_text(
        f"""
import os, sys
sys.path[:0] = [{str(Path(__file__).parent.parent)!r}]
from cuda.loops import composed as build
if __name__ != "__main__":
    with open({str(tmp_path / "built")!r}, "a") as file:
        print(os.getpid(), file=file)
"""
    )

    def isolated():
        install()
        return oomprobe.probe_target(
            f"{target}:build", progress="off", min_batch=4096, max_batch=16384, resolution=0.2
        )

    result = forked(isolated, **FORK)
    replacing = [trial for trial in result.trials if trial.passed and not trial.replayed]
    assert len(replacing) > 1
    assert len({*(tmp_path / "built").read_text().split()}) >= len(replacing)


def test_what_is_replaced_beside_an_iterator_has_only_the_margin():
    """It comes back at the end; later trials begin with the parameters that the first have replaced."""

    def build():
        trainer = Trainer((1.0 for _ in range(10**6)), width=256, device="cuda")
        return trainer.model, trainer.step

    result = forked(live, build, **FORK)
    assert not result.state_verified
    assert any("each trial went on from the last one" in note for note in result.notes)
    assert forked(lambda: runs(build, result.batch_size, steps=50), **FORK)


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
