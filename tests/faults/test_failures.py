"""Failures told apart: memory, a limit of the size, a poisoned process, a bug."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from faults.card import CARD, SAMPLE_BYTES, trained
from faults.test_answers import QUIET
from oomprobe import (
    DeviceLostError,
    StepFailedError,
    Verdict,
    classify_error,
    find_max_batch,
    probe_target,
)

MESSAGES = json.loads((Path(__file__).parents[1] / "data" / "error_messages.json").read_text(encoding="utf-8"))
FAILS_FROM = 6


def raised(message):
    """As torch raises it; a class that is not here is the one it is made of."""
    name = message["exception"].removeprefix("torch.")
    kind = {"OutOfMemoryError": torch.OutOfMemoryError, "AcceleratorError": torch.AcceleratorError}.get(name)
    return (kind or RuntimeError)(message["message"])


def failing_with(make, *, pressed):
    """Memory really ran out before, where that is said: an ambiguous text is judged by it."""

    def fault(batch_size):
        if batch_size < FAILS_FROM:
            return
        if pressed:
            with contextlib.suppress(torch.OutOfMemoryError):
                CARD.fake.alloc(2 * CARD.total_bytes)
        raise make()

    return trained(fault)


def of(verdict, **fields):
    rows = [m for m in MESSAGES if m["verdict"] == verdict and all(m[k] == v for k, v in fields.items())]
    assert rows
    return pytest.mark.parametrize("message", rows, ids=lambda row: row["message"][:40])


# --- 4: bugs ---


def mistaken():
    def fault(batch_size):
        if batch_size >= 4:
            raise KeyError("labels")

    return trained(fault)


@pytest.mark.parametrize("isolate", [True, False])
def test_row_04_a_bug_is_raised_as_itself(isolate):
    with pytest.raises(StepFailedError, match="labels") as failed:
        probe_target(mistaken, isolate=isolate, device=CARD, **QUIET)
    assert failed.value.batch_size == 4
    assert isinstance(failed.value.__cause__, KeyError)
    assert [t.batch_size for t in failed.value.trials] == [1, 2]


@of("BUG")
def test_row_04_texts_of_bugs_are_no_limit(message):
    with pytest.raises(StepFailedError) as failed:
        find_max_batch(*failing_with(lambda: raised(message), pressed=False), device=CARD, **QUIET)
    assert message["message"] in str(failed.value)


# --- 6: texts of memory ---


@of("OOM")
def test_row_06_texts_of_memory_are_a_limit(message, monkeypatch):
    monkeypatch.setattr(CARD, "integrated", "NVML_SUCCESS" in message["message"])  # that one is Jetson's
    result = find_max_batch(
        *failing_with(lambda: raised(message), pressed=True), device=CARD, memory_fraction=1.0, **QUIET
    )
    assert (result.batch_size, result.first_failing_batch_size) == (FAILS_FROM - 1, FAILS_FROM)
    assert result.limited_by in ("memory", "host_memory")


@of("POISONED")
def test_row_06_texts_of_a_sticky_error_end_the_process(message):
    with pytest.raises(DeviceLostError):
        find_max_batch(
            *failing_with(lambda: (CARD.fake.poison(), raised(message))[1], pressed=False), device=CARD, **QUIET
        )


@of("SIZE_LIMIT")
def test_row_13_texts_of_other_limits_are_no_memory(message):
    result = find_max_batch(
        *failing_with(lambda: raised(message), pressed=False), device=CARD, memory_fraction=1.0, **QUIET
    )
    assert (result.batch_size, result.limited_by) == (FAILS_FROM - 1, "size_limit")


# --- 21: an out-of-memory error inside another ---


def test_row_21_a_compiler_that_runs_out_of_memory_is_a_limit():
    def backend(graph, inputs):
        if any(isinstance(i, torch.Tensor) and i.dim() == 2 and i.shape[0] >= FAILS_FROM for i in inputs):
            CARD.fake.alloc(2 * CARD.total_bytes)
        return graph.forward

    model = torch.compile(nn.Linear(3, 3), backend=backend)
    seen = []

    def step(model, batch_size):
        held = CARD.fake.alloc(SAMPLE_BYTES * batch_size)
        try:
            model(torch.randn(batch_size, 3)).sum().backward()
        except Exception as error:
            seen.append(type(error))
            raise
        return held

    torch._dynamo.reset()
    try:
        result = find_max_batch(model, step, device=CARD, memory_fraction=1.0, **QUIET)
    finally:
        torch._dynamo.reset()
    assert (result.batch_size, result.limited_by) == (FAILS_FROM - 1, "memory")
    assert all(not issubclass(kind, torch.OutOfMemoryError) for kind in seen)


# --- 24: an allocation that failed while a CUDA graph was captured ---

CAPTURE = next(m["message"] for m in MESSAGES if "during capture" in m["message"])


@pytest.mark.parametrize("pressed", [True, False])
def test_row_24_a_capture_is_a_limit_where_memory_ran_out(pressed):
    failing = failing_with(lambda: torch.AcceleratorError(CAPTURE), pressed=pressed)
    if not pressed:
        with pytest.raises(StepFailedError, match="during capture"):
            find_max_batch(*failing, device=CARD, memory_fraction=1.0, **QUIET)
        return
    result = find_max_batch(*failing, device=CARD, memory_fraction=1.0, **QUIET)
    assert (result.batch_size, result.limited_by) == (FAILS_FROM - 1, "memory")


# --- 30: exceptions that break whoever reads them ---


class Hostile(Exception):
    args = property(lambda self: 1 / 0)

    def __str__(self):
        raise ZeroDivisionError

    __repr__ = __str__


@pytest.mark.parametrize(
    "error", [RuntimeError(42), RuntimeError(), RuntimeError(None, b"\xff"), Hostile(), OSError(5, "x"), KeyError(())]
)
def test_row_30_no_exception_breaks_the_verdict(error):
    assert classify_error(error) in Verdict

    def fault(batch_size):
        raise error

    with pytest.raises(StepFailedError) as failed:
        find_max_batch(*trained(fault), device=CARD, **QUIET)
    assert failed.value.__cause__ is error
