"""find_max_batch and check as a caller sees them."""

import os
import random
import signal
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger import MIB, LedgerDevice, Log, taking
from ledger import probe as probe_model
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from zoo import training_step

import oomprobe
from oomprobe import Phase, Verdict


def probe(device, step, **options):
    return probe_model(nn.Linear(1, 1), step, device=device, **options)


def check(device, step, batch_size, **options):
    return oomprobe.check(
        nn.Linear(1, 1), step, batch_size, device=device, progress="off", **options
    )


def accumulating(device, gradient_bytes, per_sample=MIB):
    """A model and a step whose gradients stay allocated between micro-batches."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def take_and_draw(batch_size):
        device.take(
            batch_size * per_sample + (gradient_bytes if model.weight.grad is not None else 0)
        )
        return torch.ones(batch_size, 4)

    return model, training_step(optimizer, take_and_draw, torch.sum), optimizer


# --- the answer ---


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    measures_reserved=st.booleans(),
    total=st.integers(2, 5000),
    fixed_share=st.floats(0, 0.8),
    fraction=st.floats(0.3, 1.0),
    multiple=st.integers(1, 9),
)
def test_the_answer_is_the_exact_limit_under_the_cap(
    measures_reserved, total, fixed_share, fraction, multiple
):
    device = LedgerDevice(total * MIB, measures_reserved=measures_reserved)
    fixed = int(total * fixed_share) * MIB
    budget = int(fraction * total * MIB)
    limit = (budget - fixed) // MIB // multiple * multiple
    step = taking(device, fixed=fixed)
    if limit < multiple:
        with pytest.raises(oomprobe.NothingFitsError):
            probe(device, step, memory_fraction=fraction, multiple_of=multiple)
        return
    result = probe(device, step, memory_fraction=fraction, multiple_of=multiple, resolution=0)
    assert result.batch_size == limit
    assert result.budget_bytes == budget
    confirmed = [t for t in result.trials if t.batch_size == limit and t.phase is Phase.CONFIRM]
    assert [t.verdict for t in confirmed] == [Verdict.FITS]
    assert confirmed[0].cap_bytes == (None if fraction == 1.0 else budget)
    above = [t for t in result.trials if t.batch_size == limit + multiple and not t.passed]
    assert above, "the next size was run and failed"


@pytest.mark.parametrize(("memory_fraction", "bracket"), [(0.9, (10, 16, 32)), (1.0, (20, 20, 21))])
def test_answer_and_bracket_with_and_without_a_margin(memory_fraction, bracket):
    """With a fixed cost of 80 of 100 MiB, 10 % of the memory is half of the samples."""
    device = LedgerDevice(100 * MIB)
    result = probe(device, taking(device, fixed=80 * MIB), memory_fraction=memory_fraction)
    assert (result.batch_size, result.limit_batch_size, result.first_failing_batch_size) == bracket
    assert result.limited_by == "memory"


@pytest.mark.parametrize(
    ("on_host", "said"),
    [(False, "the step varies: batch 96"), (True, "transient failure: batch 96")],
)
def test_a_size_that_fails_once_is_noted(on_host, said):
    """On the host, other processes come and go; elsewhere the step must have caused it, so the failure stands."""
    device, failures = (
        LedgerDevice(100 * MIB),
        Log([torch.OutOfMemoryError("CUDA out of memory (a neighbour)")]),
    )
    device.on_host = on_host

    def fail_once(batch_size):
        if batch_size == 96 and failures:
            raise failures.pop()

    result = probe(device, taking(device, then=fail_once), memory_fraction=1.0)
    assert (result.batch_size >= 96) is on_host
    noted = [note for note in result.notes if note.startswith(("the step varies", "transient"))]
    assert noted
    assert all(note.startswith(said) for note in noted)


def test_min_batch_max_batch_multiple_of_and_resolution():
    device = LedgerDevice(1000 * MIB)
    limited = probe(device, taking(device), max_batch=100, multiple_of=8, min_batch=5)
    assert (limited.batch_size, limited.limited_by) == (96, "max_batch")
    assert all(t.batch_size % 8 == 0 for t in limited.trials)
    coarse = probe(device, taking(device), resolution=0.1)
    assert 810 <= coarse.batch_size <= 900
    assert len(coarse.trials) < len(probe(device, taking(device)).trials)
    assert any("not exact" in note for note in coarse.notes)


def test_global_batch_runs_the_planned_split():
    """Gradients that stay allocated between micro-batches make the planned size smaller."""
    device = LedgerDevice(100 * MIB)
    model, step, optimizer = accumulating(device, 10 * MIB)
    result = probe_model(model, step, device=device, memory_fraction=1.0, global_batch=400)
    assert result.batch_size == 100
    accumulated = [t for t in result.trials if t.accumulation_steps > 1]
    assert not accumulated[0].passed
    assert accumulated[-1].passed
    assert (
        accumulated[-1].steps == 1 + accumulated[-1].accumulation_steps
    )  # the first creates the optimizer's state
    best = result.plan(400)[0]
    assert best.micro_batch * best.accumulation_steps == best.global_batch
    assert (best.micro_batch, best.ran_accumulated) == (accumulated[-1].batch_size, True)
    assert vars(optimizer).get("step") is None, "the replaced method was restored"


def test_check_confirms_one_size_beside_half_of_it():
    device = LedgerDevice(100 * MIB)
    result = check(device, taking(device), 90)
    assert result.batch_size == 90
    ran = [(trial.batch_size, trial.phase, trial.cap_bytes) for trial in result.trials]
    assert ran == [(45, Phase.GROW, 90 * MIB), (90, Phase.CONFIRM, 90 * MIB)]
    with pytest.raises(oomprobe.NothingFitsError):
        check(device, taking(device), 91)
    assert check(device, taking(device), 100, memory_fraction=1.0).batch_size == 100


@pytest.mark.parametrize(("size", "ran"), [(72, [32, 72]), (8, [8])])
def test_half_of_a_size_that_is_checked_is_a_multiple_too(size, ran):
    device = LedgerDevice(100 * MIB)
    result = check(device, taking(device), size, multiple_of=8)
    assert [trial.batch_size for trial in result.trials] == ran


def test_a_progress_callable_gets_each_trial():
    device, seen = LedgerDevice(10 * MIB), []
    assert probe(device, taking(device), progress=seen.append).trials == tuple(seen)


# --- no answer ---


ILLEGAL_ADDRESS = RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    "error", [ILLEGAL_ADDRESS, torch.OutOfMemoryError("x"), ValueError("x")], ids=repr
)
def test_a_poisoned_process_gives_no_further_verdict(error):
    """Whether the error says so, or any other error leaves the device unhealthy; what is on the host comes back."""
    device, calls, seen = LedgerDevice(10 * MIB), Log(), []

    def step(model, batch_size):
        calls.append(batch_size)
        seen.append(random.random())
        if batch_size == 8:
            device.is_healthy = False
            raise error
        device.take(batch_size * MIB)

    generator = random.getstate()
    with pytest.raises(
        oomprobe.DeviceLostError, match=f"{type(error).__name__}.*save it before you probe"
    ) as caught:
        probe(device, step)
    assert seen == []
    assert random.getstate() == generator
    assert (calls[-1], list(calls)) == (8, sorted(calls))
    assert (caught.value.trials[-1].batch_size, caught.value.trials[-1].verdict) == (
        8,
        Verdict.POISONED,
    )


# --- time and signals ---


def test_growing_stops_in_time_to_confirm():
    device = LedgerDevice(10**6 * MIB)
    step = taking(device, then=lambda batch_size: time.sleep(0.002 * batch_size))
    result = probe(device, step, time_limit_s=2.5)
    assert 16 <= result.batch_size <= 256
    assert (result.limited_by, result.confirmation.batch_size) == ("time_limit", result.batch_size)
    assert "limited by  the time limit, not memory: nothing larger was tried" in str(result)


def test_an_interruption_carries_the_trials():
    device, sent = LedgerDevice(4 * MIB), Log()

    def interrupt(trial):
        sent.append(trial)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as raised:
        probe(device, taking(device), progress=interrupt)
    [note] = raised.value.__notes__
    assert note.startswith("oomprobe was interrupted; the trials so far:\n")
    assert "grow" in note
    assert len(sent) == 1


def test_ranks_that_the_step_starts_are_refused():
    """As with accelerate's drop-in, whose function makes its own Accelerator."""

    def step(model, batch_size):
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        model(torch.randn(batch_size, 2)).sum().backward()

    try:
        with pytest.raises(
            oomprobe.InvalidArgumentError, match=r"torch\.distributed has 2 ranks"
        ) as refused:
            probe_model(nn.Linear(2, 2), step)
    finally:
        torch.distributed.destroy_process_group()
    assert refused.value.trials == ()


def test_a_fault_of_the_probe_is_not_told_as_the_steps(monkeypatch):
    monkeypatch.setattr("oomprobe.state.Tracker.add", None)

    def step(model, batch_size):
        model(torch.randn(batch_size, 2)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()  # is saved before it steps

    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        probe_model(nn.Linear(2, 2), step)


def test_a_step_that_varies_says_so_where_no_look_has_shown_it():
    def step(model, batch_size):
        model(torch.ones(batch_size, random.randrange(10, 1000), 2, device="cuda")).sum().backward()

    result = oomprobe.check(
        nn.Linear(2, 2), step, 8, device="sim:1GiB", confirm_steps=5, progress="off"
    )
    assert any(
        note.startswith("the step allocates different amounts from call to call")
        for note in result.notes
    )


def test_a_gradient_beside_the_model_is_no_mere_forward_pass():
    scale = torch.ones(4, requires_grad=True)
    result = probe(
        LedgerDevice(), lambda model, n: (scale * torch.ones(n, 4)).sum().backward(), max_batch=4
    )
    assert any(
        "no optimizer stepped" in note and "though gradients were computed" in note
        for note in result.notes
    )
