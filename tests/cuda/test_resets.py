"""Steps that reset torch's statistics of memory: a probe sees what it sees without the resets. Compared on the bed."""

import warnings
from functools import partial

import pytest
import torch
from bed import forked
from ledger import Log
from resets import RESETS, all_of_them
from zoo import numbered

import oomprobe

from .test_settled import WIDTH, begun, train


def probed(reset, *, evaluates=True):
    """Probe a loop that may evaluate at every 7th call, and then resets; return what trials showed, and what the loop saw."""
    (model, optimizer), seen_by_the_step = begun(), Log()

    def train_and_reset(model, batch_size):
        train(model, optimizer, batch_size)
        reset()

    @numbered
    def train_and_evaluate(number, model, batch_size):
        if number % 7 == 0:
            with torch.no_grad():
                model(torch.randn(8 * batch_size, WIDTH, device="cuda"))
        train_and_reset(model, batch_size)
        total = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
        seen_by_the_step.append(
            (torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated(), total == 0)
        )

    functions = vars(torch._C).copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        step, max_batch = (
            (train_and_evaluate, None) if evaluates else (train_and_reset, 1024)
        )  # far from the limit, calls repeat
        result = oomprobe.find_max_batch(
            model, step, max_batch=max_batch, resolution=0.05, progress="off"
        )
    assert vars(torch._C) == functions
    shown = [
        (one.batch_size, one.verdict, one.steps, one.settled_after, one.peak_allocated_bytes, one.peak_reserved_bytes,
         one.alloc_retries, one.leaked_bytes)
        for one in result.trials
    ]  # fmt: skip
    return shown, [note for note in result.notes if "call" in note], set(seen_by_the_step)


@pytest.fixture(scope="module")
def without_resets():
    shown, notes, seen = forked(probed, lambda: None)
    assert seen == {(False, False)}
    assert any(retries for *_, retries, _ in shown)
    return shown, notes


@pytest.mark.parametrize("way", RESETS)
def test_a_reset_hides_nothing(way, without_resets):
    shown, notes, seen = forked(probed, RESETS[way])
    assert (shown, notes) == without_resets
    # The step itself sees what it would see in training.
    assert seen == {("peaks" in way, "counters" in way)}


def test_calls_that_reset_are_seen_to_repeat():
    trained = partial(probed, evaluates=False)
    shown, notes, _ = forked(trained, lambda: None)
    assert shown[-1][3] is not None
    assert forked(trained, all_of_them)[:2] == (shown, notes)
