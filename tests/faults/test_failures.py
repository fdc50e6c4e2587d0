"""Failures are told apart: memory, a size limit, a bug. All error texts are in tests/test_verdict.py."""

import contextlib

import pytest
import torch

from faults.card import CARD, trained
from oomprobe import StepFailedError, find_max_batch, probe_target

FAILS_FROM = 6
FAILURES = {  # the error, whether memory ran out before it, and what limits the answer
    "memory": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), True, "memory"),
    "memory of the host": (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True, "host_memory"),
    "size": (RuntimeError("CUDA error: invalid configuration argument"), False, "size_limit"),
    "bug": (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 2x2)"), False, StepFailedError),
}


@pytest.mark.parametrize(("error", "pressed", "limited_by"), FAILURES.values(), ids=FAILURES)
def test_a_failure_is_a_limit_of_its_kind_or_an_error(error, pressed, limited_by):
    def fault(batch_size):
        if batch_size < FAILS_FROM:
            return
        if pressed:
            with contextlib.suppress(torch.OutOfMemoryError):
                CARD.fake.alloc(2 * CARD.total_bytes)
        raise type(error)(*error.args)  # a new exception, because a kept one would hold the step's frame

    options = {"device": CARD, "memory_fraction": 1.0, "progress": "off"}
    if limited_by is StepFailedError:
        with pytest.raises(StepFailedError) as failed:
            find_max_batch(*trained(fault), **options)
        assert str(error) in str(failed.value)
        return
    result = find_max_batch(*trained(fault), **options)
    assert (result.batch_size, result.first_failing_batch_size) == (FAILS_FROM - 1, FAILS_FROM)
    assert result.limited_by == limited_by


def mistaken():
    def fault(batch_size):
        if batch_size >= 4:
            raise KeyError("labels")

    return trained(fault)


@pytest.mark.parametrize("isolate", [True, False])
def test_a_bug_keeps_its_exception_as_the_cause(isolate):
    with pytest.raises(StepFailedError, match="labels") as failed:
        probe_target(mistaken, isolate=isolate, device=CARD, progress="off")
    assert failed.value.batch_size == 4
    assert isinstance(failed.value.__cause__, KeyError)
    assert [t.batch_size for t in failed.value.trials] == [1, 2]
