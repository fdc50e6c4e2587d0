"""Failures are told apart: memory, and a size limit. All error texts are in tests/test_verdict.py, bugs in tests/golden/first_mistakes.txt."""

import contextlib

import pytest
import torch

from faults.card import CARD, ROOM, trained
from oomprobe import find_max_batch

FAILS_FROM = 6


@pytest.mark.parametrize(
    ("error", "pressed", "limited_by"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
            True,
            "memory",
        ),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True, "host_memory"),
        (RuntimeError("CUDA error: invalid configuration argument"), False, "size_limit"),
    ],
    ids=["memory", "memory of the host", "size"],
)
def test_a_failure_limits_the_answer_by_its_kind(error, pressed, limited_by):
    def fault(batch_size):
        if batch_size < FAILS_FROM:
            return
        if pressed:
            with contextlib.suppress(torch.OutOfMemoryError):
                CARD.take(2 * CARD.total_bytes)
        raise type(error)(
            *error.args
        )  # a new exception, because a kept one would hold the step's frame

    result = find_max_batch(*trained(fault), device=CARD, memory_fraction=1.0, progress="off")
    assert (result.batch_size, result.first_failing_batch_size) == (FAILS_FROM - 1, FAILS_FROM)
    assert result.limited_by == limited_by
    assert result.fit.predicted_max_batch == ROOM  # the straight line decides nothing
