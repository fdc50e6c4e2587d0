"""find_max_batch and check as a caller sees them."""

import math
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger import MIB, LedgerDevice
from torch import nn

import oomprobe
from oomprobe import Phase, Verdict
from oomprobe.report import fit


def linear_step(device, *, fixed=0, per_sample=MIB):
    def step(model, batch_size):
        torch.ones(batch_size)
        device.take(fixed + batch_size * per_sample)

    return step


def probe(device, step, **options):
    return oomprobe.find_max_batch(nn.Linear(1, 1), step, device=device, progress="off", **options)


@pytest.mark.parametrize("measures_reserved", [True, False])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    total=st.integers(2, 5000),
    fixed_share=st.floats(0, 0.8),
    fraction=st.floats(0.3, 1.0),
    multiple=st.integers(1, 9),
)
def test_the_answer_is_the_exact_limit_under_the_cap(measures_reserved, total, fixed_share, fraction, multiple):
    device = LedgerDevice(total * MIB, measures_reserved=measures_reserved)
    fixed = int(total * fixed_share) * MIB
    budget = int(fraction * total * MIB)
    limit = (budget - fixed) // MIB // multiple * multiple
    step = linear_step(device, fixed=fixed)
    if limit < multiple:
        with pytest.raises(oomprobe.NothingFitsError):
            probe(device, step, memory_fraction=fraction, multiple_of=multiple)
        return
    result = probe(device, step, memory_fraction=fraction, multiple_of=multiple)
    assert result.batch_size == limit
    assert result.budget_bytes == budget
    confirmed = [t for t in result.trials if t.batch_size == limit and t.phase is Phase.CONFIRM]
    assert [t.verdict for t in confirmed] == [Verdict.FITS]
    assert confirmed[0].cap_bytes == (None if fraction == 1.0 else budget)
    above = [t for t in result.trials if t.batch_size == limit + multiple and not t.passed]
    assert above, "the next size was run and failed"


def test_the_margin_is_memory_not_samples():
    """With a fixed cost of 80 of 100 MiB, 10 % of the memory is half of the samples."""
    device = LedgerDevice(100 * MIB)
    result = probe(device, linear_step(device, fixed=80 * MIB), memory_fraction=0.9)
    assert (result.batch_size, result.limit_batch_size) == (10, 16)
    full = probe(device, linear_step(device, fixed=80 * MIB), memory_fraction=1.0)
    assert (full.batch_size, full.first_failing_batch_size) == (20, 21)


def test_bracket_and_trial_bound():
    device = LedgerDevice(1000 * MIB, measures_reserved=False)
    result = probe(device, linear_step(device))
    searched = [t for t in result.trials if t.phase in (Phase.GROW, Phase.BISECT)]
    assert len(searched) <= 2 * math.ceil(math.log2(result.limit_batch_size)) + 3
    assert len({(t.batch_size, t.cap_bytes) for t in searched}) == len(searched)
    assert result.limit_batch_size == 900 == result.batch_size
    assert result.first_failing_batch_size == 1024
    assert result.limited_by == "memory"


@pytest.mark.parametrize("lie", [0.0, 1e9, float("nan"), float("inf")])
def test_the_answer_does_not_depend_on_the_fit(monkeypatch, lie):
    device = LedgerDevice(777 * MIB)
    honest = probe(device, linear_step(device, fixed=50 * MIB))
    from oomprobe.report import summary

    false = fit.LinearFit(
        fixed_bytes=lie, bytes_per_sample=lie, r_squared=lie, max_relative_error=lie, predicted_max_batch=12345
    )
    monkeypatch.setattr(summary, "fit_line", lambda points, budget: false)
    lied_to = probe(device, linear_step(device, fixed=50 * MIB))
    assert lied_to.fit is false
    assert (lied_to.batch_size, lied_to.limit_batch_size) == (honest.batch_size, honest.limit_batch_size)


def test_a_transient_failure_is_struck_out_and_noted():
    device, failed = LedgerDevice(100 * MIB), []

    def step(model, batch_size):
        torch.ones(batch_size)
        device.take(batch_size * MIB)
        if batch_size == 65 and not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory (a neighbour)")

    result = probe(device, step, memory_fraction=1.0)
    if failed:
        assert any("transient failure" in note for note in result.notes)
    assert result.batch_size == 100


def test_a_size_that_fails_only_in_confirmation_is_left():
    device, calls = LedgerDevice(100 * MIB), {}

    def step(model, batch_size):
        torch.ones(batch_size)
        calls[batch_size] = calls.get(batch_size, 0) + 1
        fragmentation = 20 * MIB if batch_size > 70 and calls[batch_size] > 40 else 0
        device.take(batch_size * MIB + fragmentation)

    result = probe(device, step, memory_fraction=1.0, confirm_steps=60)
    assert result.batch_size == 80
    assert any("failed in confirmation" in note for note in result.notes)


def test_max_batch_min_batch_multiple_of_resolution():
    device = LedgerDevice(1000 * MIB)
    limited = probe(device, linear_step(device), max_batch=100, multiple_of=8, min_batch=5)
    assert (limited.batch_size, limited.limited_by) == (96, "max_batch")
    assert all(t.batch_size % 8 == 0 for t in limited.trials)
    coarse = probe(device, linear_step(device), resolution=0.1)
    assert 810 <= coarse.batch_size <= 900
    assert len(coarse.trials) < len(probe(device, linear_step(device)).trials)
    assert any("not exact" in note for note in coarse.notes)


@pytest.mark.parametrize(
    ("error", "limited_by"),
    [
        (RuntimeError("CUDA error: invalid configuration argument"), "size_limit"),
        (MemoryError(), "host_memory"),
        (torch.OutOfMemoryError("CUDA out of memory."), "memory"),
    ],
)
def test_what_limits(error, limited_by):
    device = LedgerDevice()

    def step(model, batch_size):
        torch.ones(batch_size)
        device.take(batch_size * MIB)
        if batch_size > 20:
            raise error

    result = probe(device, step)
    assert (result.batch_size, result.limited_by) == (20, limited_by)


def test_an_ambiguous_text_is_memory_only_with_corroboration():
    device = LedgerDevice()

    def step(pressure):
        def run(model, batch_size):
            torch.ones(batch_size)
            device.take(batch_size * MIB)
            if batch_size > 20:
                device.pressure = pressure
                raise RuntimeError("GET was unable to find an engine to execute this computation")

        return run

    assert probe(device, step(True)).batch_size == 20
    with pytest.raises(oomprobe.StepFailedError, match="batch size 32"):
        probe(device, step(False))


def test_a_bug_is_the_users_own_exception_with_the_batch_size():
    device = LedgerDevice()

    def step(model, batch_size):
        torch.ones(batch_size)
        if batch_size >= 8:
            raise KeyError("labels")

    with pytest.raises(oomprobe.StepFailedError) as caught:
        probe(device, step)
    assert caught.value.batch_size == 8
    assert "at batch size 8 with KeyError: 'labels'" in str(caught.value)
    assert type(caught.value.__cause__) is KeyError
    assert [t.batch_size for t in caught.value.trials] == [1, 2, 4]


def test_batch_norm_at_one_says_min_batch():
    model = nn.BatchNorm1d(4)
    step = lambda model, batch_size: model(torch.randn(batch_size, 4)).sum().backward()  # noqa: E731
    with pytest.raises(oomprobe.StepFailedError, match="min_batch=2"):
        oomprobe.find_max_batch(model, step, device=LedgerDevice(), progress="off")
    assert (
        oomprobe.find_max_batch(model, step, device=LedgerDevice(), min_batch=2, max_batch=4, progress="off").batch_size
        == 4
    )


def test_a_poisoned_process_gives_no_further_verdict():
    device, calls = LedgerDevice(), []

    def step(model, batch_size):
        calls.append(batch_size)
        torch.ones(batch_size)
        if batch_size == 16:
            device.is_healthy = False
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(oomprobe.DeviceLostError, match="illegal memory access") as caught:
        probe(device, step)
    assert calls[-1] == 16
    assert caught.value.trials[-1].verdict is Verdict.POISONED
    assert set(caught.value.snapshot["model"]) == {"weight", "bias"}


def test_an_out_of_memory_that_leaves_the_device_sick_is_poison():
    device = LedgerDevice(10 * MIB)

    def step(model, batch_size):
        torch.ones(batch_size)
        device.is_healthy = batch_size < 16
        device.take(batch_size * MIB)

    with pytest.raises(oomprobe.DeviceLostError):
        probe(device, step)


def test_nothing_fits_says_how_much_there_was():
    device = LedgerDevice(10 * MIB)
    with pytest.raises(
        oomprobe.NothingFitsError, match=r"batch 1, the smallest allowed, does not fit on ledger"
    ) as caught:
        probe(device, linear_step(device, fixed=20 * MIB))
    assert [t.phase for t in caught.value.trials] == [Phase.GROW, Phase.RECHECK]
    with pytest.raises(oomprobe.NothingFitsError, match=r"a budget of 9\.00 MiB \(memory_fraction=0\.9\)"):
        probe(device, linear_step(device, fixed=9 * MIB))


def test_global_batch_runs_the_planned_split():
    """Gradients that stay resident between micro-batches make the planned size smaller."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = LedgerDevice(100 * MIB)
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))

    def step(model, batch_size):
        optimizer.zero_grad()
        gradients = 10 * MIB if model.weight.grad is not None else 0
        device.take(batch_size * MIB + gradients)
        model(torch.randn(batch_size, 4)).sum().backward()
        optimizer.step()

    result = oomprobe.find_max_batch(model, step, device=device, memory_fraction=1.0, global_batch=400, progress="off")
    assert result.batch_size == 100
    accumulated = [t for t in result.trials if t.accumulation_steps > 1]
    assert not accumulated[0].passed
    assert accumulated[-1].passed
    best = result.plan(400)[0]
    assert best.micro_batch * best.accumulation_steps == best.global_batch
    assert (best.micro_batch, best.ran_accumulated) == (accumulated[-1].batch_size, True)
    assert vars(optimizer).get("step") is None, "held back, and given back"


def test_plan_of_a_prime():
    device = LedgerDevice(64 * MIB)
    result = probe(device, linear_step(device), memory_fraction=1.0)
    first = result.plan(1009)[0]
    assert (first.micro_batch, first.accumulation_steps, first.global_batch) == (63, 16, 1008)


def test_time_limit_with_a_size_known_gives_that_size():
    """Bisecting stops in time for the confirmation."""
    import time

    device = LedgerDevice(1000 * MIB)

    def step(model, batch_size):
        torch.ones(batch_size)
        time.sleep(0.0004 * batch_size)
        device.take(batch_size * MIB)

    result = probe(device, step, time_limit_s=2.5)
    assert 256 <= result.batch_size < 900
    assert any("time limit" in note for note in result.notes)


def test_trial_time_limit():
    import time

    device = LedgerDevice()

    def step(model, batch_size):
        torch.ones(batch_size)
        time.sleep(0.01 * batch_size)

    with pytest.raises(oomprobe.TimeLimitError, match=r"trial_time_limit_s=0\.2") as caught:
        probe(device, step, trial_time_limit_s=0.2)
    assert caught.value.trials[-1].verdict is Verdict.TIMED_OUT


def test_progress_callable_gets_each_trial():
    device, seen = LedgerDevice(10 * MIB), []
    result = oomprobe.find_max_batch(nn.Linear(1, 1), linear_step(device), device=device, progress=seen.append)
    assert tuple(seen) == result.trials


def test_probe_target_in_process():
    result = oomprobe.probe_target(
        "oomprobe.demo:small_gpt", isolate=False, device="cpu:1GiB", max_batch=2, progress="off"
    )
    assert result.batch_size == 2


# --- check ---


def test_check():
    device = LedgerDevice(100 * MIB)
    result = oomprobe.check(nn.Linear(1, 1), linear_step(device), 90, device=device, progress="off")
    assert result.batch_size == 90
    assert [(t.phase, t.cap_bytes) for t in result.trials] == [(Phase.CONFIRM, 90 * MIB)]
    with pytest.raises(oomprobe.NothingFitsError):
        oomprobe.check(nn.Linear(1, 1), linear_step(device), 91, device=device, progress="off")
    full = oomprobe.check(nn.Linear(1, 1), linear_step(device), 100, device=device, memory_fraction=1.0, progress="off")
    assert full.batch_size == 100


# --- real memory, real processes ---


def run_script(tmp_path, body, **options):
    script = tmp_path / "train.py"
    script.write_text("import torch, oomprobe\nfrom torch import nn\n" + textwrap.dedent(body))
    return subprocess.Popen(
        [sys.executable, "-u", str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_real_host_memory_fails_for_real(tmp_path):
    process = run_script(
        tmp_path,
        """
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        def step(model, batch_size):
            optimizer.zero_grad()
            x = torch.randn(batch_size, 64, 512).transpose(1, 2)
            model(x).square().mean().backward()
            optimizer.step()
        result = oomprobe.find_max_batch(model, step, device="cpu:256MiB", progress="off", resolution=0.05)
        texts = {t.error.split(":")[0] for t in result.trials if t.error}
        assert result.limited_by == "memory" and result.state_verified, result
        assert texts == {"RuntimeError"}, texts
        print(result.batch_size)
        """,
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    truth = 230 * 2**20 / (3 * 512 * 64 * 4)  # the batch, what it is turned into, and the output; gradients come later
    assert 0.1 * truth < int(out) < 1.03 * truth


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_a_real_signal_restores_everything(tmp_path, number, code):
    process = run_script(
        tmp_path,
        """
        import signal, sys, time
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = model.weight.clone()
        def step(model, batch_size):
            model(torch.randn(batch_size, 3)).sum().backward()
            optimizer.step()
            if batch_size == 8:
                print("ready", flush=True)
                time.sleep(60)
        try:
            oomprobe.find_max_batch(model, step, device="cpu:1GiB", progress="off")
        finally:
            print("same", torch.equal(before, model.weight), model.weight.grad is None, optimizer.state == {})
            print(*getattr(sys.exc_info()[1], "__notes__", []))
            sys.stdout.flush()
        """,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert "same True True True" in out, err
    assert "oomprobe was interrupted; the trials so far" in out
    assert process.returncode in (code, -number), err


@pytest.mark.parametrize("place", ["between steps", "restoring"])
@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_an_interruption_carries_the_trials(place, number, error):
    sent = []

    def send(*_):
        if not sent:
            sent.append(number)
            os.kill(os.getpid(), number)

    class Elsewhere:  # so that only load_state_dict can put it back
        count = 0

    class Average:
        def __init__(self):
            self.inner = Elsewhere()

        def state_dict(self):
            return {"count": self.inner.count}

        def load_state_dict(self, state):
            self.inner.count = state["count"]
            if place == "restoring" and tried:
                send()

    device, average, tried = LedgerDevice(4 * MIB), Average(), []
    fill = linear_step(device)

    def step(model, batch_size):
        average.inner.count += 1
        fill(model, batch_size)

    def tell(trial):
        tried.append(trial)
        if place == "between steps":
            send()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(error) as raised:
            oomprobe.find_max_batch(
                nn.Linear(1, 1),
                step,
                device=device,
                preserve=[average],
                progress=tell,
            )
    finally:
        signal.signal(signal.SIGINT, before)
    assert sent
    assert [note.splitlines()[0] for note in raised.value.__notes__] == ["oomprobe was interrupted; the trials so far:"]
    assert "grow" in raised.value.__notes__[0]


def test_a_second_thread_may_probe():
    import threading

    answers = []
    device = LedgerDevice(10 * MIB)
    thread = threading.Thread(
        target=lambda: answers.append(probe(device, linear_step(device), memory_fraction=1.0).batch_size)
    )
    thread.start()
    thread.join()
    assert answers == [10]


def test_a_cpu_model_beside_an_accelerator_is_noted_loudly(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    model = nn.Linear(2, 2)
    step = lambda model, batch_size: model(torch.randn(batch_size, 2)).sum().backward()  # noqa: E731
    result = oomprobe.find_max_batch(model, step, max_batch=1, progress="off")
    assert result.notes[0].startswith("THE MODEL IS ON THE CPU")


assert os.name == "posix"


def test_a_plan_that_runs_out_of_time_does_not_lose_the_answer():
    import time

    device = LedgerDevice(8 * MIB)

    def step(model, batch_size):
        torch.ones(batch_size)
        device.take(batch_size * MIB)
        time.sleep(0.03)

    result = probe(device, step, memory_fraction=1.0, global_batch=256, time_limit_s=3.0, steps=1)
    assert result.batch_size == 8


def test_a_half_stepped_scaler_fails_no_later_trial():
    """The usual order with clipping: between unscale_ and update a scaler refuses another unscale_."""
    model = nn.Linear(4, 1)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(model, batch_size):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(batch_size, 4)).square().mean()).backward()
        scaler.unscale_(optimizer)
        if batch_size > 9:
            torch.empty(2**50)
        scaler.step(optimizer)
        scaler.update()

    assert oomprobe.find_max_batch(model, step, device="cpu:1GiB", progress="off").batch_size == 9
