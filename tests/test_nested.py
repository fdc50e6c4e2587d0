"""A probe inside a step: what it raises is the step's own exception, never an answer of the probe around it."""

import pytest
import torch
from ledger import MIB, LedgerDevice
from torch import nn

import oomprobe
from oomprobe.errors import step_failed
from oomprobe.verdicts import Evidence, Verdict, classify, classify_error, facts_of

OURS = [
    oomprobe.NothingFitsError(
        "batch 1: out of memory\n  OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    ),
    oomprobe.TimeLimitError("time passed during batch 1"),
    oomprobe.UnreliableError("RuntimeError: CUDA error: out of memory"),
    oomprobe.InvalidArgumentError("steps must be at least 1"),
    oomprobe.NoDeviceError("no device"),
    oomprobe.StepFailedError("the step failed"),
]
KINDS = [type(error).__name__ for error in OURS]
PRESSED = Evidence(smaller_size_passed=True, memory_pressure=True)


def chained(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("error", OURS, ids=KINDS)
def test_what_a_probe_raised_is_no_out_of_memory(error):
    assert classify_error(error, PRESSED) is Verdict.BUG
    assert classify_error(chained(KeyError("cache"), error), PRESSED) is Verdict.BUG


def test_what_it_was_raised_from_is_judged_already():
    failed = chained(step_failed(KeyError("x"), batch_size=1), torch.OutOfMemoryError("CUDA out of memory"))
    assert classify_error(failed, PRESSED) is Verdict.BUG
    # beside it stands another error: that one counts
    both = ExceptionGroup("both", [failed, torch.OutOfMemoryError("CUDA out of memory")])
    assert classify_error(both, PRESSED) is Verdict.OOM


def test_a_lost_device_is_lost_to_the_outer_probe_too():
    lost = oomprobe.DeviceLostError("a sticky error (CUDA error: an illegal memory access was encountered)")
    assert classify_error(lost) is Verdict.POISONED
    sick = Evidence(smaller_size_passed=True, memory_pressure=True, healthy=False)
    assert classify(facts_of(oomprobe.NothingFitsError("x")), sick) is Verdict.POISONED


def test_a_real_probe_inside_a_step():
    inner, outer = LedgerDevice(8 * MIB), LedgerDevice()

    def inner_step(model, batch_size):
        torch.ones(batch_size)
        inner.take(batch_size * 16 * MIB)

    def step(model, batch_size):
        torch.ones(batch_size)
        if batch_size >= 4:
            oomprobe.find_max_batch(nn.Linear(1, 1), inner_step, device=inner, progress="off")

    with pytest.raises(oomprobe.StepFailedError) as caught:
        oomprobe.find_max_batch(nn.Linear(1, 1), step, device=outer, progress="off")
    assert type(caught.value) is oomprobe.StepFailedError
    assert isinstance(caught.value.__cause__, oomprobe.NothingFitsError)
    assert caught.value.batch_size == 4
    assert [t.passed for t in caught.value.trials] == [True, True]
