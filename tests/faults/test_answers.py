"""Answers under faults: the size ran, the margin is memory, and the report says what is doubtful."""

import pytest
import torch
from fake_accelerator import MIB
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger import LedgerDevice, Log
from torch import nn

from faults.card import CARD, ROOM, SAMPLE_BYTES, trained
from oomprobe import NothingFitsError, UnreliableError, Verdict, find_max_batch
from oomprobe.records import fit

QUIET = {"progress": "off"}


def oracle(fits):
    """Return a device, a model, a step that succeeds if `fits(batch_size)`, and the list of sizes that succeeded."""
    device, ran = LedgerDevice(), Log()

    def step(model, batch_size):
        torch.ones(batch_size)
        device.take(MIB if fits(batch_size) else 2 * device.total_bytes)
        ran.append(batch_size)

    return device, nn.Linear(1, 1), step, ran


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(failing=st.sets(st.integers(1, 40), max_size=12), last=st.integers(1, 48))
def test_whatever_fails_the_answer_ran(failing, last):
    device, model, step, ran = oracle(lambda size: size not in failing)
    try:
        result = find_max_batch(model, step, device=device, max_batch=last, **QUIET)
    except NothingFitsError:
        assert 1 in failing
        return
    assert ran[-1] == result.batch_size <= last
    assert [t.verdict for t in result.trials if t.batch_size == result.batch_size][-1] is Verdict.FITS


def does_nothing(model, batch_size):
    return None


def ignores_its_size(model, batch_size):
    model(torch.ones(4, 2)).sum().backward()


@pytest.mark.parametrize("step", [does_nothing, ignores_its_size])
def test_a_step_that_does_no_work_has_no_answer(step):
    with pytest.raises(UnreliableError, match=r"no torch operator|ignores batch_size"):
        find_max_batch(nn.Linear(2, 2), step, device="cpu:1GiB", **QUIET)


def test_a_wrong_linear_fit_changes_no_answer(monkeypatch):
    wrong = fit.LinearFit(
        fixed_bytes=0, bytes_per_sample=1e-9, r_squared=1, max_relative_error=0, predicted_max_batch=253731
    )
    monkeypatch.setattr("oomprobe.probing.summary.fit_line", lambda points, budget: wrong)
    result = find_max_batch(*trained(), device=CARD, memory_fraction=1.0, **QUIET)
    assert (result.batch_size, result.fit) == (ROOM, wrong)


@pytest.mark.parametrize("pressed", [True, False])
def test_an_answer_that_needs_retries_at_each_call_is_marginal(pressed):
    model = nn.Linear(2, 2)

    def step(model, batch_size):
        first = CARD.fake.alloc(SAMPLE_BYTES * batch_size)
        del first  # cached: only an allocation of the same size reuses it
        second = CARD.fake.alloc(SAMPLE_BYTES * batch_size - (MIB if pressed else 0))
        model(torch.randn(batch_size, 2)).sum().backward()
        return second

    result = find_max_batch(model, step, device=CARD, memory_fraction=1.0, **QUIET)
    assert result.batch_size == ROOM
    assert any(note.startswith("marginal: ") for note in result.notes) is pressed


def test_a_second_call_knows_nothing_of_the_first():
    room = {"samples": 9}
    device, model, step, _ = oracle(lambda size: size <= room["samples"])
    assert find_max_batch(model, step, device=device, **QUIET).batch_size == 9
    room["samples"] = 30
    assert find_max_batch(model, step, device=device, **QUIET).batch_size == 30
