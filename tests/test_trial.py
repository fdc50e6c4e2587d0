"""Steady state, leak freedom and what a trial keeps."""

import gc
import time
import weakref

import pytest
import torch
from ledger import MIB, LedgerDevice
from torch import nn

import oomprobe
from oomprobe.result import Phase
from oomprobe.verdicts import Verdict

QUICK = {"progress": "off", "max_batch": 2}


def linear():
    model = nn.Linear(4, 4)
    return model, torch.optim.Adam(model.parameters())


def calls_by_trial(result, calls):
    return [t.steps for t in result.trials], calls


def test_a_step_runs_until_its_optimizer_stepped():
    model, optimizer = linear()

    def step(model, batch_size):
        model(torch.randn(batch_size, 4)).sum().backward()
        optimizer.step()

    result = oomprobe.find_max_batch(model, step, device=LedgerDevice(), steps=2, confirm_steps=5, **QUICK)
    by_phase = {t.phase: t.steps for t in result.trials}
    assert by_phase == {Phase.GROW: 3, Phase.CONFIRM: 6}


def test_a_scaler_that_skips_six_steps_is_waited_for():
    model, optimizer = linear()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))

    def step(model, batch_size):
        optimizer.zero_grad()
        overflow = float("inf") if len(calls) < 6 else 1.0
        scaler.scale(model(torch.randn(batch_size, 4)).mean() * overflow).backward()
        scaler.step(optimizer)
        scaler.update()
        calls.append(len(stepped))

    calls = []
    result = oomprobe.find_max_batch(
        model, step, device=LedgerDevice(), min_batch=1, max_batch=1, progress="off", memory_fraction=1.0
    )
    skipped = calls.index(1)
    assert skipped == 6, calls
    assert result.trials[0].steps == 6 + 1 + 2
    assert result.notes == ()


def test_accumulation_over_four_calls_runs_full_cycles():
    model, optimizer = linear()
    state = {"calls": 0}

    def step(model, batch_size):
        model(torch.randn(batch_size, 4)).sum().backward()
        state["calls"] += 1
        if state["calls"] % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

    result = oomprobe.find_max_batch(
        model, step, device=LedgerDevice(), min_batch=1, max_batch=1, progress="off", memory_fraction=1.0
    )
    assert [t.steps for t in result.trials] == [4 + 2 * 4, 4 + 5 * 4]


def test_no_optimizer_is_noted_after_32_calls():
    calls = []

    def step(model, batch_size):
        calls.append(batch_size)
        model(torch.randn(batch_size, 4))

    result = oomprobe.find_max_batch(nn.Linear(4, 4), step, device=LedgerDevice(), **QUICK)
    assert result.trials[0].steps == 32 + 2
    assert [t.steps for t in result.trials[1:]] == [2, 5], "later trials know it"
    assert any("no optimizer stepped in 32 calls" in note for note in result.notes)


def test_two_optimizers_of_which_one_steps_every_third_call():
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    often, rarely = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    state = {"calls": 0}

    def step(model, batch_size):
        for part in model:
            part(torch.randn(batch_size, 4)).sum().backward()
        often.step()
        state["calls"] += 1
        if state["calls"] % 3 == 0:
            rarely.step()

    result = oomprobe.find_max_batch(
        model, step, device=LedgerDevice(), min_batch=1, max_batch=1, progress="off", memory_fraction=1.0
    )
    assert [t.steps for t in result.trials] == [3 + 2 * 3, 3 + 5 * 3]


def test_memory_that_only_the_second_step_needs_counts():
    """Adam's state appears in step 1, so step 2 is the first to see it."""
    device = LedgerDevice(100 * MIB)
    model, optimizer = linear()
    state = {"resident": 0}

    def step(model, batch_size):
        device.take(state["resident"] + batch_size * MIB)
        model(torch.randn(1, 4)).sum().backward()
        optimizer.step()
        state["resident"] = 40 * MIB

    result = oomprobe.find_max_batch(model, step, device=device, memory_fraction=1.0, progress="off")
    assert result.batch_size == 60


def test_several_steps_name_the_limiting_one():
    device = LedgerDevice(64 * MIB)
    steps = {
        "train": lambda m, b: (device.take(b * MIB), torch.ones(b))[1],
        "eval": lambda m, b: (device.take(2 * b * MIB), torch.ones(b))[1],
    }
    result = oomprobe.find_max_batch(nn.Linear(1, 1), steps, device=device, memory_fraction=1.0, progress="off")
    assert (result.batch_size, result.limiting_step) == (32, "eval")
    assert not any("evaluation" in line for line in result.not_covered)
    assert "eval" in str(result)


# --- leak freedom ---


def failing_step(device, references, *, cycle=False, keep=None):
    def step(model, batch_size):
        activation = torch.ones(batch_size * 1000)
        references.append((batch_size, weakref.ref(activation)))
        if cycle:
            loop = [activation]
            loop.append(loop)
        if keep is not None:
            keep.append(activation)
        device.take(batch_size * MIB)
        del activation

    return step


def test_a_failed_trials_tensors_die_at_once(monkeypatch):
    device, references, alive_at_next = LedgerDevice(10 * MIB), [], []
    inner = failing_step(device, references)

    def step(model, batch_size):
        alive_at_next.extend(size for size, ref in references if ref() is not None)
        inner(model, batch_size)

    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    gc.disable()
    try:
        result = oomprobe.find_max_batch(nn.Linear(1, 1), step, device=device, progress="off")
        assert any(not t.passed for t in result.trials)
        assert alive_at_next == []
        assert [size for size, ref in references if ref() is not None] == []
    finally:
        gc.enable()


def test_the_check_above_can_fail(monkeypatch):
    """A trial that kept its exception would keep the tensors."""
    from oomprobe import trial

    kept, real = [], trial.failure_of
    monkeypatch.setattr(trial, "failure_of", lambda error: kept.append(error) or real(error))
    device, references = LedgerDevice(10 * MIB), []
    oomprobe.find_max_batch(nn.Linear(1, 1), failing_step(device, references), device=device, progress="off")
    assert any(ref() is not None for _, ref in references)


def test_cycles_of_a_failed_trial_are_collected():
    device, references = LedgerDevice(10 * MIB), []
    oomprobe.find_max_batch(
        nn.Linear(1, 1), failing_step(device, references, cycle=True), device=device, progress="off"
    )
    alive = {size for size, ref in references if ref() is not None}
    assert not any(size > 9 for size in alive), "9 fit; larger ones failed"


def test_a_leak_is_an_error_with_its_bytes():
    device = LedgerDevice(1000 * MIB)

    def step(model, batch_size):
        torch.ones(batch_size)
        device.leak(batch_size * MIB)

    with pytest.raises(oomprobe.UnreliableError, match=r"MiB did not come back after batch \d+") as caught:
        oomprobe.find_max_batch(nn.Linear(1, 1), step, device=device, progress="off")
    assert caught.value.trials[-1].leaked_bytes > 50 * MIB


def with_a_rare_expert(device, expert_bytes, *, used_from):
    """Its state comes at the first size that uses it; the ledger is told of that, and of its end, as a device would be."""
    often, rare = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(expert_bytes // 4))
    optimizer = torch.optim.AdamW([often, rare], foreach=False)
    model = nn.ParameterList([often, rare])

    def step(model, batch_size):
        optimizer.zero_grad()
        device.take(batch_size * 100 * MIB)
        (often.sum() + (rare.sum() if batch_size >= used_from else 0)).backward()
        is_first = rare.grad is not None and rare not in optimizer.state
        optimizer.step()
        if is_first:
            device.live += 2 * expert_bytes
            weakref.finalize(optimizer.state[rare]["exp_avg"], gives_back).atexit = False

    def gives_back():
        device.live -= 2 * expert_bytes

    return model, step


def test_parameters_first_used_later_are_no_leak():
    device = LedgerDevice(1000 * MIB)
    model, step = with_a_rare_expert(device, 30 * MIB, used_from=4)
    result = oomprobe.find_max_batch(model, step, device=device, progress="off")
    assert result.batch_size == 8
    assert not any(note.startswith("leak") for note in result.notes)


def test_what_stays_beside_such_state_is_one():
    device = LedgerDevice(1000 * MIB)
    model, inner = with_a_rare_expert(device, 30 * MIB, used_from=4)

    def step(model, batch_size):
        inner(model, batch_size)
        device.live += 100 * MIB if batch_size == 4 else 0

    with pytest.raises(oomprobe.UnreliableError, match=r"did not come back after batch 4"):
        oomprobe.find_max_batch(model, step, device=device, progress="off")


def test_optimizer_state_that_grows_with_each_step_is_told():
    """It is no state that came with a parameter's first use, and training would end in it."""
    device = LedgerDevice(1000 * MIB)
    weight = nn.Parameter(torch.ones(4))
    model, optimizer = nn.ParameterList([weight]), torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight]["past"] = torch.ones(0)

    def step(model, batch_size):
        device.take(batch_size * 100 * MIB)
        weight.sum().backward()
        optimizer.step()
        past = optimizer.state[weight]["past"]
        optimizer.state[weight]["past"] = torch.ones(len(past) + 2**15)
        device.live += 2**17

    result = oomprobe.find_max_batch(model, step, device=device, progress="off", max_batch=4)
    assert result.trials[-1].step_leaked_bytes == 2**17
    assert any("keeps 128.00 KiB" in note for note in result.notes)


def test_a_small_leak_is_reported_with_its_bytes():
    device, leaked = LedgerDevice(1000 * MIB), []

    def step(model, batch_size):
        torch.ones(batch_size)
        device.take(batch_size * 100 * MIB)
        if batch_size == 4 and not leaked:
            leaked.append(True)
            device.live += 3 * MIB

    result = oomprobe.find_max_batch(nn.Linear(1, 1), step, device=device, progress="off")
    assert result.trials[-1].leaked_bytes == 3 * MIB
    assert any(note.startswith("leak: 3.00 MiB") for note in result.notes)
    assert "LEAKED 3.00 MiB" in str(result)


def keeping(device, kept_bytes, sample_bytes=100 * MIB):
    def step(model, batch_size):
        torch.ones(batch_size)
        device.take(batch_size * sample_bytes)
        device.live += kept_bytes

    return step


def test_a_leak_that_eats_the_margin_is_an_error():
    device = LedgerDevice(1000 * MIB)
    with pytest.raises(oomprobe.UnreliableError, match=r"each step at batch 8 keeps 1.25 MiB.* after about 85 more"):
        oomprobe.check(nn.Linear(1, 1), keeping(device, 5 * MIB // 4, 106 * MIB), 8, device=device, progress="off")


def test_the_same_leak_of_a_size_that_leaves_much_free_is_told():
    """A check, or a search that max_batch ends, has more than the margin left, and may have no margin at all."""
    device = LedgerDevice(1000 * MIB)
    options = {"device": device, "memory_fraction": 1.0, "progress": "off"}
    result = oomprobe.check(nn.Linear(1, 1), keeping(device, 5 * MIB // 4), 2, **options)
    assert any("keeps 1.25 MiB, and what is left free lasts for about 604 of them" in note for note in result.notes)


def test_a_slow_leak_says_how_long_the_free_memory_lasts():
    device = LedgerDevice(1000 * MIB)
    result = oomprobe.check(nn.Linear(1, 1), keeping(device, MIB // 4), 4, device=device, progress="off")
    assert result.trials[-1].step_leaked_bytes == MIB // 4
    assert any("keeps 256.00 KiB, and what is left free lasts for about 2364" in note for note in result.notes)


def test_garbage_that_awaits_collection_is_no_leak():
    device = LedgerDevice(1000 * MIB)

    def gives_back():
        device.live -= MIB

    def step(model, batch_size):
        device.take(batch_size * 100 * MIB)
        cycle = nn.Identity()
        cycle.itself = [cycle]
        weakref.finalize(cycle, gives_back)
        device.live += MIB

    gc.disable()
    try:
        confirmed = oomprobe.check(nn.Linear(1, 1), step, 4, device=device, progress="off").trials[-1]
    finally:
        gc.enable()
    assert (confirmed.verdict, confirmed.step_leaked_bytes) == (Verdict.FITS, 0)


def test_one_leaking_step_of_several_counts_once():
    device = LedgerDevice(1000 * MIB)
    others = {name: lambda model, batch_size: torch.ones(batch_size) for name in ("eval", "save", "test")}
    steps = {"train": keeping(device, MIB // 64), **others}
    options = {"device": device, "max_batch": 1, "confirm_steps": 4, "progress": "off"}
    confirmed = oomprobe.find_max_batch(nn.Linear(1, 1), steps, **options).trials[-1]
    assert (confirmed.step_leaked_bytes, confirmed.steps) == (MIB // 64, 4 * 4)


def test_a_step_that_keeps_its_last_batch_does_not_leak():
    """What it keeps is replaced by the next, smaller batch: a cache, not a leak."""
    device = LedgerDevice(1000 * MIB)

    def step(model, batch_size):
        torch.ones(batch_size)
        device.live = 0
        device.take(batch_size * 10 * MIB)
        device.live = batch_size * 8 * MIB

    result = oomprobe.find_max_batch(nn.Linear(1, 1), step, device=device, memory_fraction=1.0, progress="off")
    assert result.batch_size == 100
    assert not any(t.leaked_bytes for t in result.trials)


# --- a step that needs the same memory at every size ---


def does_nothing(model, batch_size):
    pass


def ignores_its_size(model, batch_size):
    model(torch.ones(8, 4)).sum().backward()


@pytest.mark.parametrize("step", [does_nothing, ignores_its_size])
def test_a_step_in_the_same_memory_at_every_size(step):
    with pytest.raises(oomprobe.UnreliableError, match="runs in the memory of batch 1, so memory does not limit"):
        oomprobe.find_max_batch(nn.Linear(4, 1), step, device=LedgerDevice(), progress="off")


def test_a_data_set_that_ends_is_not_a_maximum():
    device = LedgerDevice()

    def step(model, batch_size):
        device.take(min(batch_size, 100) * MIB)

    with pytest.raises(
        oomprobe.UnreliableError, match=r"in the memory of batch 128.* If it is the data, pass max_batch"
    ):
        oomprobe.find_max_batch(nn.Linear(4, 4), step, device=device, progress="off")


@pytest.mark.parametrize("counts", [True, False])
def test_work_that_shows_in_what_is_handed_out(counts):
    """A small batch beside a large optimizer: the peak is flat, and only what each step is handed out tells sizes apart."""
    device = LedgerDevice()
    served = [0]
    if counts:
        device.served_bytes = lambda: served[0]

    def step(model, batch_size):
        device.take(max(500 * MIB, batch_size * MIB // 2**14))
        served[0] += batch_size

    assert oomprobe.find_max_batch(nn.Linear(4, 4), step, device=device, progress="off").batch_size == 900 * 2**14


def test_random_lengths_do_not_double_for_ever():
    device = LedgerDevice()

    def step(model, batch_size):
        torch.ones(int(torch.randint(1, 100, ())))

    with pytest.raises(oomprobe.UnreliableError, match="so memory does not limit"):
        oomprobe.find_max_batch(nn.Linear(1, 1), step, device=device, progress="off")


def test_a_step_that_rounds_up_to_chunks_is_not_refused():
    device = LedgerDevice(1000 * MIB)

    def step(model, batch_size):
        chunks = -(-batch_size // 8)
        torch.ones(8 * chunks)
        device.take(8 * chunks * MIB)

    result = oomprobe.find_max_batch(nn.Linear(1, 1), step, device=device, memory_fraction=1.0, progress="off")
    assert result.batch_size == 1000


# --- what must not pass for a size that ran ---


def test_a_size_that_stops_training_does_not_fit():
    model, optimizer = linear()

    def step(model, batch_size):
        model(torch.randn(batch_size, 4)).sum().backward()
        if batch_size < 8:
            optimizer.step()

    with pytest.raises(oomprobe.UnreliableError, match=r"at batch 8 the optimizer .* did not step in 32 calls"):
        oomprobe.find_max_batch(model, step, device=LedgerDevice(), progress="off")


def test_a_step_that_swallows_out_of_memory():
    device = LedgerDevice(50 * MIB)
    model, optimizer = linear()

    def step(model, batch_size):
        try:
            device.take(batch_size * MIB)
        except torch.OutOfMemoryError:
            return
        model(torch.randn(batch_size, 4)).sum().backward()
        optimizer.step()

    with pytest.raises(oomprobe.UnreliableError, match="at batch 64") as caught:
        oomprobe.find_max_batch(model, step, device=device, progress="off")
    assert [t.batch_size for t in caught.value.trials] == [1, 2, 4, 8, 16, 32]


def test_an_optimizer_built_anew_on_each_call():
    model = nn.Linear(4, 4)

    def step(model, batch_size):
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(batch_size, 4)).sum().backward()
        optimizer.step()

    result = oomprobe.find_max_batch(model, step, device=LedgerDevice(), **QUICK)
    assert [t.steps for t in result.trials] == [3, 3, 6]
    assert result.state_verified


def test_named_steps_begin_in_the_mode_the_model_was_in():
    modes = []

    def train(model, batch_size):
        modes.append(model.training)
        model(torch.randn(batch_size, 4)).sum().backward()

    def evaluate(model, batch_size):
        model.eval()
        model(torch.randn(batch_size, 4))

    oomprobe.find_max_batch(nn.Linear(4, 4), {"train": train, "eval": evaluate}, device=LedgerDevice(), **QUICK)
    assert all(modes)


def test_the_time_of_several_steps_is_their_sum():
    import time

    def slow(model, batch_size):
        torch.ones(batch_size)
        time.sleep(0.02)

    steps = {"train": slow, "eval": lambda m, b: torch.ones(b)}
    result = oomprobe.find_max_batch(
        nn.Linear(1, 1), steps, device=LedgerDevice(), min_batch=1, max_batch=1, progress="off"
    )
    assert result.trials[-1].step_s >= 0.02


def test_out_of_memory_between_unscale_and_update_is_not_a_bug():
    device = LedgerDevice(10 * MIB)
    model, optimizer = linear()
    scaler = torch.amp.GradScaler("cpu")

    def step(model, batch_size):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(batch_size, 4)).mean()).backward()
        scaler.unscale_(optimizer)
        device.take(batch_size * MIB)
        scaler.step(optimizer)
        scaler.update()

    result = oomprobe.find_max_batch(model, step, device=device, memory_fraction=1.0, progress="off")
    assert result.batch_size == 10


def test_a_scheduler_does_not_run_off_its_end():
    model, optimizer = linear()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=20)
    before = scheduler.state_dict()

    def step(model, batch_size):
        optimizer.zero_grad()
        model(torch.randn(batch_size, 4)).sum().backward()
        optimizer.step()
        scheduler.step()

    result = oomprobe.find_max_batch(model, step, device=LedgerDevice(), max_batch=64, progress="off")
    assert result.batch_size == 64
    assert scheduler.state_dict() == before


class Lenient(LedgerDevice):
    """Serves beyond its cap, as an allocator does from what it holds already."""

    def take(self, size_bytes):
        self.limit = self.total_bytes
        return super().take(size_bytes)


@pytest.mark.parametrize("trial_time_limit_s", [None, 0.2])
def test_what_ran_with_more_than_its_cap_did_not_pass_under_it(trial_time_limit_s):
    device = Lenient()
    model, optimizer = linear()

    def step(model, batch_size):
        held = device.take(100 * batch_size * MIB)
        if trial_time_limit_s and device.caps[-1] is not None and batch_size > 5:  # over the cap, and late
            time.sleep(0.5)
        model(torch.randn(batch_size, 4)).sum().backward()
        optimizer.step()
        return held

    options = {"device": device, "memory_fraction": 0.5, "trial_time_limit_s": trial_time_limit_s, "progress": "off"}
    if trial_time_limit_s:  # a trial that timed out is not called one of memory, whatever it took
        with pytest.raises(oomprobe.TimeLimitError) as raised:
            oomprobe.find_max_batch(model, step, **options)
        last = raised.value.trials[-1]
        assert (last.verdict, last.error) == (Verdict.TIMED_OUT, None)
        assert last.peak_allocated_bytes > last.cap_bytes > 0
        return
    result = oomprobe.find_max_batch(model, step, **options)
    assert result.batch_size == 5
    assert any("its peak was over the cap" in (t.error or "") for t in result.trials)


def test_an_optimizer_that_wraps_another_is_not_waited_for():
    """accelerate's is an Optimizer whose step is the inner one's: it is never seen to step itself."""

    class Wrapped(torch.optim.Optimizer):
        def __init__(self, inner):
            self.optimizer, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}

        def step(self, closure=None):
            self.optimizer.step(closure)

    model = torch.nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = Wrapped(inner)

    def step(model, batch_size):
        model(torch.ones(batch_size, 4)).sum().backward()
        wrapped.step()
        inner.zero_grad()

    result = oomprobe.find_max_batch(model, step, device="cpu:1GiB", max_batch=2, progress="off", preserve=[inner])
    assert result.trials[0].steps == 3


def test_weights_that_trials_have_worn_out_are_put_back():
    """Each step makes them a hundred times as large, until a loss scaler sees infinities only and skips every step."""
    device, calls = LedgerDevice(), []
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(model, batch_size):
        device.take(batch_size * MIB)
        optimizer.zero_grad()
        scaler.scale(-50 * weight.square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        calls.append(scaler.get_scale())

    result = oomprobe.find_max_batch(nn.ParameterList([weight]), step, device=device, max_batch=500, progress="off")
    assert (result.batch_size, result.state_verified) == (500, True)
    assert min(calls) < 1 < max(calls) == 4.0  # it skipped, and started over
    assert (weight == 1).all()


def test_a_loss_scale_starts_over_in_each_trial():
    device, scales = LedgerDevice(), []
    model, optimizer = linear()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)  # gradients are infinite: the first steps are skipped

    def step(model, batch_size):
        scales.append(scaler.get_scale())
        scaler.scale(8 * model(torch.randn(batch_size, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    result = oomprobe.find_max_batch(model, step, device=device, progress="off", max_batch=4)
    assert scales.count(2.0**127) == len(result.trials)
    assert scaler._scale is None
