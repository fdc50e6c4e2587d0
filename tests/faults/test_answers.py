"""What is returned: sizes that were run, under a margin that is memory. The truth comes from trying every size."""

import math

import pytest
import torch
from fake_accelerator import MIB, ledger
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger import LedgerDevice
from torch import nn

from faults.card import CARD, ROOM, SAMPLE_BYTES, scanned, trained
from oomprobe import (
    NothingFitsError,
    Phase,
    StepFailedError,
    UnreliableError,
    Verdict,
    check,
    find_max_batch,
)
from oomprobe.report import fit

QUIET = {"progress": "off"}


def oracle(fits):
    """A device, a model, a step that runs where `fits` says so, and the sizes that it ran at to the end."""
    device, ran = LedgerDevice(), []

    def step(model, batch_size):
        torch.ones(batch_size)
        device.take(MIB if fits(batch_size) else 2 * device.total_bytes)
        ran.append(batch_size)

    return device, nn.Linear(1, 1), step, ran


# --- 1: the answer was run ---


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(failing=st.sets(st.integers(1, 40), max_size=12), last=st.integers(1, 48))
def test_row_01_whatever_fails_the_answer_ran(failing, last):
    device, model, step, ran = oracle(lambda size: size not in failing)
    try:
        result = find_max_batch(model, step, device=device, max_batch=last, **QUIET)
    except NothingFitsError:
        assert 1 in failing
        return
    assert ran[-2] == result.batch_size  # after it only what rules of thumb count, in a call at the smallest size
    assert result.batch_size <= last
    assert [t.verdict for t in result.trials if t.batch_size == result.batch_size][-1] is Verdict.FITS


# --- 2: a trial that did no work ---


def does_nothing(model, batch_size):
    return None


def ignores_its_size(model, batch_size):
    model(torch.ones(4, 2)).sum().backward()


@pytest.mark.parametrize("step", [does_nothing, ignores_its_size])
def test_row_02_a_step_that_does_no_work_has_no_answer(step):
    with pytest.raises(UnreliableError, match=r"no torch operator|ignores batch_size"):
        find_max_batch(nn.Linear(2, 2), step, device="cpu:1GiB", **QUIET)


# --- 8: the order of the search does not decide ---


@pytest.mark.parametrize("multiple_of", [1, 3])
def test_row_08_every_start_finds_the_same_size(multiple_of):
    starts = [n for n in (1, 2, 3, 5, 7, 9) if n >= multiple_of]
    found = set()
    for start in starts:
        device, model, step, _ = ledger(total_bytes=1024 * MIB, per_sample_bytes=32 * MIB)
        result = find_max_batch(model, step, device=device, min_batch=start, multiple_of=multiple_of, **QUIET)
        assert any(t.phase is Phase.CONFIRM and t.passed for t in result.trials)
        found.add(result.batch_size)
    truth = scanned(lambda n: 64 * MIB + n * 32 * MIB <= int(0.9 * 1024 * MIB), largest=64)
    assert found == {truth // multiple_of * multiple_of}


# --- 9: later steps that need more ---


@pytest.mark.parametrize("every", [1, 4])
def test_row_09_optimizer_state_counts(every):
    """Gradients accumulate over several calls, and the call that steps needs two samples' memory more."""
    model = nn.Linear(2, 2)
    optimizer, calls = torch.optim.AdamW(model.parameters()), []

    def step(model, batch_size):
        calls.append(batch_size)
        held = CARD.fake.alloc(SAMPLE_BYTES * batch_size)
        model(torch.randn(batch_size, 2)).square().sum().backward()
        if len(calls) % every == 0:
            more = CARD.fake.alloc(2 * SAMPLE_BYTES)
            optimizer.step()
            optimizer.zero_grad()
            del more
        return held

    result = find_max_batch(model, step, device=CARD, memory_fraction=1.0, **QUIET)
    assert result.batch_size == scanned(lambda n: n + 2 <= ROOM) == ROOM - 2


# --- 12: drivers that lend memory of the host where a card would be out of it ---


def test_row_12_memory_that_spills_is_no_memory_of_the_card(monkeypatch):
    monkeypatch.setattr("platform.release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    total, context, resident = 4096 * MIB, 124 * MIB, 512 * MIB
    device, model, step, called = ledger(
        total_bytes=total, outside_bytes=context, spilled_bytes=64 * total, per_sample_bytes=32 * MIB
    )
    result = find_max_batch(model, step, device=device, **QUIET)
    assert result.batch_size == scanned(
        lambda n: 64 * MIB + n * 32 * MIB <= int(0.9 * (total - context - resident)), largest=128
    )
    assert max(called) <= 2 * result.batch_size + 8
    assert any("WSL" in note for note in result.notes)


# --- 14: sizes that fail below one that passes ---


def test_row_14_a_bug_of_the_smallest_size_says_where_to_begin():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def step(model, batch_size):
        held = CARD.fake.alloc(SAMPLE_BYTES * batch_size)
        model(torch.randn(batch_size, 2)).sum().backward()
        return held

    with pytest.raises(StepFailedError, match=r"one sample.*Use min_batch=2") as failed:
        find_max_batch(model, step, device=CARD, **QUIET)
    assert isinstance(failed.value.__cause__, ValueError)
    assert "no batch size" not in str(failed.value)
    del failed  # its frames hold the memory of batch 1
    assert find_max_batch(model, step, device=CARD, min_batch=2, memory_fraction=1.0, **QUIET).batch_size == ROOM


# --- 15: the margin is memory, and the line decides nothing ---


@pytest.mark.parametrize("fixed_mib", [0, 400, 800])
def test_row_15_the_margin_is_memory(fixed_mib):
    device, model, step, _ = ledger(total_bytes=1000 * MIB, fixed_bytes=fixed_mib * MIB, per_sample_bytes=10 * MIB)
    result = find_max_batch(model, step, device=device, **QUIET)
    assert result.batch_size == scanned(lambda n: (fixed_mib + 10 * n) * MIB <= 900 * MIB, largest=100)
    assert check(model, step, result.batch_size, device=device, **QUIET).batch_size == result.batch_size
    with pytest.raises(NothingFitsError):
        check(model, step, result.batch_size + 1, device=device, **QUIET)


def test_row_15_a_line_that_lies_changes_no_answer(monkeypatch):
    lie = fit.LinearFit(
        fixed_bytes=0, bytes_per_sample=1e-9, r_squared=1, max_relative_error=0, predicted_max_batch=253731
    )
    monkeypatch.setattr("oomprobe.report.summary.fit_line", lambda points, budget: lie)
    model, step = trained()
    result = find_max_batch(model, step, device=CARD, memory_fraction=1.0, **QUIET)
    assert (result.batch_size, result.fit) == (ROOM, lie)


# --- 20: sizes that pass only under pressure ---


@pytest.mark.parametrize("pressed", [True, False])
def test_row_20_a_size_that_needed_retries_is_marginal(pressed):
    model = nn.Linear(2, 2)

    def step(model, batch_size):
        first = CARD.fake.alloc(SAMPLE_BYTES * batch_size)
        del first  # cached, and of no use for the next
        second = CARD.fake.alloc(SAMPLE_BYTES * batch_size - (MIB if pressed else 0))
        model(torch.randn(batch_size, 2)).sum().backward()
        return second

    result = find_max_batch(model, step, device=CARD, memory_fraction=1.0, **QUIET)
    assert result.batch_size == ROOM
    assert any(note.startswith("marginal: ") for note in result.notes) is pressed


# --- 25: phases that are not the training step ---


def test_row_25_the_step_that_needs_most_decides_and_is_named():
    _, train = trained()

    def evaluate(model, batch_size):
        held = CARD.fake.alloc(2 * SAMPLE_BYTES * batch_size)
        with torch.no_grad():
            model(torch.randn(batch_size, 2))
        return held

    model = nn.Linear(2, 2)
    both = find_max_batch(model, {"train": train, "eval": evaluate}, device=CARD, memory_fraction=1.0, **QUIET)
    assert (both.batch_size, both.limiting_step) == (ROOM // 2, "eval")
    alone = find_max_batch(model, train, device=CARD, memory_fraction=1.0, **QUIET)
    assert alone.batch_size == ROOM
    assert any("eval" in phase for phase in alone.not_covered)
    assert any("checkpoint" in phase for phase in alone.not_covered)


# --- 26: degenerate answers ---


@pytest.mark.parametrize("multiple_of", [1, 4])
@pytest.mark.parametrize("room", range(18))
def test_row_26_every_capacity_ends_in_bounds(room, multiple_of):
    device, model, step, _ = oracle(lambda size: size <= room)
    options = {"device": device, "memory_fraction": 1.0, "multiple_of": multiple_of, **QUIET}
    if room < multiple_of:
        with pytest.raises(NothingFitsError) as nothing:
            find_max_batch(model, step, **options)
        assert len(nothing.value.trials) <= 3
        return
    result = find_max_batch(model, step, **options)
    assert result.batch_size == scanned(lambda size: size <= room, 40) // multiple_of * multiple_of
    searched = [t for t in result.trials if t.phase in (Phase.GROW, Phase.BISECT)]
    assert len(searched) <= 2 * math.ceil(math.log2(result.batch_size // multiple_of + 1)) + 3


# --- 27: calls that know of each other ---


def test_row_27_a_second_call_knows_nothing_of_the_first():
    first = [find_max_batch(*trained(), device=CARD, max_batch=4, **QUIET).batch_size for _ in range(2)]
    assert first == [4, 4]
    room = {"samples": 9}
    device, model, step, _ = oracle(lambda size: size <= room["samples"])
    assert find_max_batch(model, step, device=device, **QUIET).batch_size == 9
    room["samples"] = 30
    assert find_max_batch(model, step, device=device, **QUIET).batch_size == 30
