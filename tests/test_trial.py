"""Trials: the steady state, leaks, and sizes that only seem to run."""

import contextlib
import gc
import re
import threading
import weakref

import pytest
import torch
from ledger import MIB, LedgerDevice, Log, probe, taking
from torch import nn
from zoo import numbered

import oomprobe
from oomprobe.devices.leaks import Baseline
from oomprobe.records.trials import Phase, Verdict


def check(step, size, device, **options):
    return oomprobe.check(nn.Linear(1, 1), step, size, device=device, progress="off", **options)


def linear():
    model = nn.Linear(4, 4)
    return model, torch.optim.Adam(model.parameters())


# --- when a step is steady ---


def stepping(*every):
    """Several parts, each with an optimizer that steps on every n-th call."""
    model = nn.ModuleList(nn.Linear(4, 4) for _ in every)
    optimizers = [torch.optim.Adam(part.parameters()) for part in model]

    @numbered
    def step(number, model, batch_size):
        for part, optimizer, each in zip(model, optimizers, every, strict=True):
            part(torch.randn(batch_size, 4)).sum().backward()
            if number % each == 0:
                optimizer.step()
                optimizer.zero_grad()

    return model, step


def scaled(device=None, *, skips=0):
    """A loss scaler skips the first steps, whose gradients are infinite; `unscale_` comes before memory runs out."""
    model, optimizer = linear()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)

    @numbered
    def step(number, model, batch_size):
        optimizer.zero_grad()
        overflow = float("inf") if number <= skips else 8.0
        scaler.scale(model(torch.randn(batch_size, 4)).sum() * overflow).backward()
        scaler.unscale_(optimizer)
        if device is not None:
            device.take(batch_size * MIB)
        scaler.step(optimizer)
        scaler.update()

    return model, step


@pytest.mark.parametrize(
    ("build", "calls"),
    [(lambda: stepping(1, 3), [3 + 2 * 3, 3 + 60 * 3]), (lambda: scaled(skips=6), [7 + 2, 7 + 60])],
    ids=["two optimizers", "scaler"],
)
def test_trials_run_until_every_optimizer_has_stepped(build, calls):
    result = probe(*build(), max_batch=1, memory_fraction=1.0, steps=2, confirm_steps=60)
    assert [(t.phase, t.steps) for t in result.trials] == list(
        zip((Phase.GROW, Phase.CONFIRM), calls, strict=True)
    )
    assert not any("no optimizer" in note for note in result.notes)
    assert result.state_verified


def test_a_missing_optimizer_is_noted_after_32_calls():
    result = probe(
        nn.Linear(4, 4), lambda model, n: model(torch.randn(n, 4)).sum().backward(), max_batch=2
    )
    assert [t.steps for t in result.trials] == [32 + 1, 2, 50], "later trials wait for none"
    assert any("no optimizer stepped in 32 calls" in note for note in result.notes)


def test_an_optimizer_that_never_stepped_is_noted():
    notes = probe(*stepping(1, 40), max_batch=1).notes
    assert any("some optimizers (1) did not step in 32 calls" in note for note in notes)


@pytest.mark.parametrize(
    ("trained", "is_frozen", "is_told"),
    [("new", False, False), ("old", False, True), ("old new", False, False), ("old", True, False)],
    ids=["its own", "another model's", "both", "a model that does not train"],
)
def test_an_optimizer_of_another_model_is_told(trained, is_frozen, is_told):
    """As in a notebook whose cell of the model ran again, and not that of the optimizer."""
    models = {"old": nn.Linear(4, 4), "new": nn.Linear(4, 4)}
    optimizers = [torch.optim.Adam(models[name].parameters()) for name in trained.split()]
    models["new"].requires_grad_(not is_frozen)

    def step(model, batch_size):
        models["old"](model(torch.randn(batch_size, 4))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    notes = probe(models["new"], step, max_batch=2).notes
    assert any("make its optimizer anew too" in note for note in notes) is is_told
    assert any("80 B belong to another" in note for note in notes) is is_told


def test_each_of_several_steps_meets_the_state_of_the_others():
    device = LedgerDevice(100 * MIB)
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]

    def half(nth):
        def step(_, batch_size):
            optimizers[nth].zero_grad()
            device.take(
                10 * MIB * sum(bool(optimizer.state) for optimizer in optimizers) + batch_size * MIB
            )
            models[nth](torch.ones(batch_size, 1)).sum().backward()
            optimizers[nth].step()

        return step

    result = probe(
        nn.ModuleList(models), {"G": half(0), "D": half(1)}, device=device, memory_fraction=1.0
    )
    assert result.batch_size == 80


# --- leaks ---


def test_cycles_of_a_failed_trial_are_collected():
    device, references, alive = LedgerDevice(10 * MIB), Log(), Log()

    def step(model, batch_size):
        alive.append(any(one() is not None for one in references))
        if batch_size > 9:  # which fails
            loop = [torch.ones(1)]
            loop.append(loop)
            references.append(weakref.ref(loop[0]))
        device.take(batch_size * MIB)

    gc.disable()
    try:
        assert probe(nn.Linear(1, 1), step, device=device).batch_size == 9
    finally:
        gc.enable()
    assert len(references) > 1
    assert not any(alive)


@pytest.mark.parametrize("leaked_bytes", [3 * MIB, 100 * MIB])
def test_a_leak_is_reported_with_its_bytes_or_an_error(leaked_bytes):
    device, leaks = LedgerDevice(1000 * MIB), Log([leaked_bytes])
    step = taking(
        device,
        per_sample=100 * MIB,
        then=lambda n: device.leak(leaks.pop()) if n == 4 and leaks else None,
    )
    if leaked_bytes > 50 * MIB:
        with pytest.raises(
            oomprobe.UnreliableError, match=r"100\.00 MiB did not come back after batch 4"
        ):
            probe(nn.Linear(1, 1), step, device=device)
        return
    result = probe(nn.Linear(1, 1), step, device=device)
    assert result.trials[-1].leaked_bytes == leaked_bytes
    assert any(note.startswith("leak: 3.00 MiB") for note in result.notes)
    assert "LEAKED 3.00 MiB" in str(result)


def test_a_thread_that_may_hold_a_leak_is_named():
    """As a loader that fills a queue, which each trial makes anew."""
    device, end = LedgerDevice(1000 * MIB), threading.Event()

    def prefetch(batch_size):
        if batch_size == 4:
            device.leak(100 * MIB)
            threading.Thread(target=end.wait, name="loader", daemon=True).start()

    step = taking(device, per_sample=100 * MIB, then=prefetch)
    try:
        with pytest.raises(oomprobe.UnreliableError, match=r"still run \(loader\) and may hold it"):
            probe(nn.Linear(1, 1), step, device=device)
    finally:
        end.set()


SLOW = "keeps 256.00 KiB, so the free memory lasts for about 2287 steps"
FAST = "each step at batch 8 keeps 1.25 MiB.* after about 85 more"


@pytest.mark.parametrize(
    ("size", "kept_bytes", "told"), [(4, MIB // 4, SLOW), (8, 5 * MIB // 4, FAST)]
)
def test_a_leak_of_each_step_is_an_error_if_it_soon_fills_the_memory(size, kept_bytes, told):
    device = LedgerDevice(1000 * MIB)
    step = taking(device, per_sample=104 * MIB, then=lambda _: device.leak(kept_bytes))
    if told is FAST:
        with pytest.raises(oomprobe.UnreliableError, match=told):
            check(step, size, device)
        return
    result = check(step, size, device)
    assert result.trials[-1].step_leaked_bytes == kept_bytes
    assert any(told in note for note in result.notes)


def test_memory_that_is_freed_late_is_no_leak():
    """The autograd thread of a failed backward may hold its tensors a moment longer."""
    device, live_bytes = LedgerDevice(), iter([0, 500 * MIB, 0])
    device.live_bytes = lambda: next(live_bytes)
    baseline = Baseline(device, clean=lambda: None)
    baseline.take(1000 * MIB)
    assert baseline.settle() == 0


def test_uncollected_garbage_is_no_leak():
    device = LedgerDevice(1000 * MIB)

    def leave_a_cycle(_):
        cycle = nn.Identity()
        cycle.itself = [cycle]
        device.lend(MIB, cycle)

    gc.disable()
    try:
        result = check(taking(device, per_sample=100 * MIB, then=leave_a_cycle), 4, device)
    finally:
        gc.enable()
    assert (result.trials[-1].verdict, result.trials[-1].step_leaked_bytes) == (Verdict.FITS, 0)


# --- what lives on between calls ---


class Output:
    """What a step returns."""


def returning(device):
    """Return a step that takes memory, and as much for what it returns."""
    model, optimizer = linear()

    def step(model, batch_size):
        model(torch.randn(batch_size, 4)).sum().backward()
        optimizer.step()
        device.take(batch_size * MIB)
        out = Output()
        device.lend(batch_size * MIB, out)
        return out

    return model, step


def test_what_a_call_returns_lives_until_the_next_has_returned():
    """As in `out = step(...)`; nothing of it is a leak."""
    device = LedgerDevice(100 * MIB)
    result = probe(*returning(device), device=device, memory_fraction=1.0)
    assert (result.batch_size, result.first_failing_batch_size) == (50, 51)
    assert {trial.leaked_bytes for trial in result.trials} == {0}


def test_what_named_steps_return_lives_until_their_own_next_call():
    device = LedgerDevice(100 * MIB)
    model, train = returning(device)

    def evaluate(model, batch_size):
        device.take(batch_size * MIB)

    result = probe(model, {"train": train, "eval": evaluate}, device=device, memory_fraction=1.0)
    assert result.batch_size == 50


# --- sizes that only seem to run ---


def skip(take, train):
    """As careless code does: the optimizer does not step."""
    try:
        take(1)
    except torch.OutOfMemoryError:
        return
    train()


def skip_a_part(take, train):
    with contextlib.suppress(torch.OutOfMemoryError):
        take(1)
    train()


def skip_in_a_thread(take, train):
    thread = threading.Thread(target=skip_a_part, args=(take, lambda: None))
    thread.start()
    thread.join()
    train()


def halve(take, train):
    parts = 1
    while True:
        try:
            take(parts)
        except torch.OutOfMemoryError:
            parts *= 2
        else:
            break
    train()


def try_again(take, train):
    """For ever, as the halved part is not what does not fit."""
    while True:
        try:
            take(1)
        except torch.OutOfMemoryError:
            continue
        break
    train()


def fail_afterwards(take, train):
    try:
        take(1)
        loss = 0
    except torch.OutOfMemoryError:
        pass
    print(loss)  # noqa: T201
    train()


@pytest.mark.parametrize(
    "way", [skip, skip_a_part, skip_in_a_thread, halve, try_again, fail_afterwards]
)
def test_an_out_of_memory_error_that_the_step_catches_ends_the_trial(way):
    device = LedgerDevice(50 * MIB)
    model, optimizer = linear()

    def step(model, batch_size):
        def train():
            model(torch.randn(batch_size, 4)).sum().backward()
            optimizer.step()

        def take(parts):
            device.take(batch_size * MIB // parts)

        way(take, train)

    result = probe(model, step, device=device, memory_fraction=1.0)
    assert (result.batch_size, result.first_failing_batch_size) == (50, 51)
    failed = next(trial for trial in result.trials if trial.batch_size == 64)
    assert failed.verdict is Verdict.OOM
    assert re.search(r"\(raised at ledger.py:\d+; the step caught it", failed.error)


def test_each_named_step_starts_in_the_models_original_mode():
    modes = Log()

    def train(model, batch_size):
        modes.append(model.training)
        model(torch.randn(batch_size, 4)).sum().backward()

    def evaluate(model, batch_size):
        model.eval()
        model(torch.randn(batch_size, 4))

    probe(nn.Linear(4, 4), {"train": train, "eval": evaluate}, max_batch=2)
    assert set(modes) == {True}


def test_out_of_memory_between_unscale_and_update_is_not_a_bug():
    device = LedgerDevice(10 * MIB)
    assert probe(*scaled(device), device=device, memory_fraction=1.0).batch_size == 10


class Lenient(LedgerDevice):
    """Serves requests beyond its cap, like an allocator that reuses reserved memory."""

    def take(self, size_bytes):
        self.limit = self.total_bytes
        return super().take(size_bytes)


def test_a_peak_over_the_cap_is_not_a_pass():
    device = Lenient()
    result = probe(
        nn.Linear(1, 1),
        lambda model, n: device.take(100 * n * MIB),
        device=device,
        memory_fraction=0.5,
    )
    assert result.batch_size == 5
    assert any("its peak was over the cap" in (t.error or "") for t in result.trials)


def test_weights_that_diverge_during_trials_are_restored():
    """Each step makes them a hundred times as large, until the loss scaler sees only infinities and skips every step."""
    device, scales = LedgerDevice(), Log()
    model = nn.ParameterList([nn.Parameter(torch.ones(4))])
    optimizer = torch.optim.SGD(model, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def train(_):
        optimizer.zero_grad()
        scaler.scale(-50 * model[0].square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())

    result = probe(model, taking(device, then=train), device=device, max_batch=500)
    assert (result.batch_size, result.state_verified) == (500, True)
    assert min(scales) < 1 < max(scales) == 4.0  # it skipped steps, then started again
    assert (model[0] == 1).all()


# --- a step with a bug ---


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        (1, "at batch size 64 with ValueError: x\nThis .*: the same error occurs without oomprobe"),
        (2, "size 32 with .* came in trial 2 of its process.* once in a new process"),
        (4, "size 56 with .*; batch 48 ran: pass max_batch=48.* in trial 4 of its process"),
    ],
    ids=["first trial", "second trial", "after a pass"],
)
def test_an_error_says_what_is_known_of_it_elsewhere(failing, said):
    device = LedgerDevice(50 * MIB)
    model, optimizer = linear()
    sizes = Log()

    def step(model, batch_size):
        if sizes[-1:] != [batch_size]:
            sizes.append(batch_size)
        if len(sizes) == failing:
            raise ValueError("x")
        device.take(batch_size * MIB)
        model(torch.randn(batch_size, 4)).sum().backward()
        optimizer.step()

    with pytest.raises(oomprobe.StepFailedError, match=f"(?s){said}") as caught:
        probe(model, step, device=device, start_batch=64, memory_fraction=1.0)
    assert ("the same error" in str(caught.value)) is ("the same error" in said)
