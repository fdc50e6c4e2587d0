"""Trials that kill, hang or poison their process, or leave other processes running."""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from fake_accelerator import ILLEGAL_ADDRESS
from ledger import Log
from processes import marked

from faults.card import CARD, ROOM, trained
from oomprobe import (
    DeviceLostError,
    InvalidArgumentError,
    NoDeviceError,
    StepFailedError,
    TimeLimitError,
    UnreliableError,
    Verdict,
    check_target,
    probe_target,
)

GRACE_S = 40  # for a process to start, and for a hanging one to be terminated, on a busy machine
isolated = {"device": CARD, "memory_fraction": 1.0, "progress": "off"}


def at(size, fault):
    """Return a target with a fault at this size and above."""
    return trained(lambda batch_size: batch_size >= size and fault())


def once(fault):
    """Return a fault that happens only the first time in any process."""

    def only_once():
        first = Path(os.environ["ONCE"])
        if not first.exists():
            first.touch()
            fault()

    return only_once


def sigkill():
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps_in_c():
    ctypes.PyDLL(None).sleep(600)  # holds the GIL, so no Python signal handler runs


def illegal_access():
    CARD.fake.poison()
    CARD.fake.synchronize()


def measuring(number, fault):
    """Return a target with a fault when its process is asked for the memory this time: before, in or after a check's trial."""
    measure, calls = CARD.available_bytes, Log()

    def measured():
        calls.append(True)
        return fault() if len(calls) == number else measure()

    CARD.available_bytes = measured
    return trained()


def exits():
    os.write(2, b"a library: licence server not found\n")
    os._exit(1)


def says_out_of_memory():
    os.write(2, b"CUDA Setup failed: out of memory at line 380 in csrc/ops.cu\n")
    os._exit(1)


def aborts_for_memory():
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
    os.abort()


poisoned = partial(at, 6, illegal_access)
# The step passes, after which the card is lost while its cache is released.
poisoned_between_steps = partial(at, 6, lambda: setattr(CARD, "release", illegal_access))
lost_from_the_start = partial(at, 1, lambda: setattr(CARD, "release", illegal_access))
killed_measuring = partial(measuring, 3, sigkill)
always_killed_measuring = partial(measuring, 1, sigkill)
hanging_measuring = partial(measuring, 3, sleeps_in_c)
killed = partial(at, 5, sigkill)
exited = partial(at, 5, exits)
killed_at_nine = partial(trained, lambda batch_size: batch_size == 9 and sigkill())
hanging_at_nine = partial(trained, lambda batch_size: batch_size == 9 and sleeps_in_c())
exited_out_of_memory = partial(at, 5, says_out_of_memory)
sleeping_in_c = partial(at, 4, sleeps_in_c)
killed_once = partial(at, 7, once(sigkill))
hangs_once = partial(at, 7, once(sleeps_in_c))


def named(target):
    """Return the name of a target of this module, which may be a partial."""
    return next(f"{__name__}:{name}" for name, value in globals().items() if value is target)


def probe(target, **options):
    return probe_target(named(target), **{**isolated, **options})


# --- sticky errors ---


def test_a_new_process_replaces_a_poisoned_one():
    result = probe(poisoned, min_batch=4, max_batch=6)
    assert (result.batch_size, result.limited_by) == (5, "size_limit")
    assert any("sticky error in two processes" in note for note in result.notes)
    assert {t.batch_size for t in result.trials if t.verdict is Verdict.POISONED} == {6}


def worn_out():
    """Return a step whose optimizer does not step any more after eight calls in one process."""
    model = torch.nn.Linear(2, 2)
    optimizer, calls = torch.optim.SGD(model.parameters(), lr=0.1), Log()

    def step(model, batch_size):
        calls.append(batch_size)
        model(torch.randn(batch_size, 2)).sum().backward()
        if len(calls) <= 8:
            optimizer.step()

    return model, step


@pytest.mark.slow
def test_a_size_that_stops_training_runs_again_in_a_new_process():
    result = probe(worn_out, max_batch=4)
    sizes = 1, 2, 4, 1, 4  # the look at 1 begins with the tenth call
    assert [(t.batch_size, t.verdict) for t in result.trials] == [(size, Verdict.FITS) for size in sizes]


def test_a_card_lost_between_steps_costs_its_process_only():
    result = probe(poisoned_between_steps, min_batch=4, max_batch=6)
    assert (result.batch_size, result.limited_by) == (5, "size_limit")
    lost = [t for t in result.trials if t.verdict is Verdict.POISONED]
    assert {(t.batch_size, t.error) for t in lost} == {(6, f"AcceleratorError: {ILLEGAL_ADDRESS}")}


def test_a_card_lost_in_two_processes_ends_the_probe():
    with pytest.raises(DeviceLostError, match="a fresh process hit the same error") as lost:
        probe(lost_from_the_start)
    assert [(t.batch_size, t.verdict) for t in lost.value.trials] == [(1, Verdict.POISONED)] * 2


def records_processes():
    def record(batch_size):
        with Path(os.environ["RECORD"]).open("a") as file:
            file.write(f"{batch_size} {os.getpid()}\n")

    model, step = trained()

    def recording(model, batch_size):
        record(batch_size)
        return step(model, batch_size)

    return model, recording


def test_no_process_runs_another_trial_after_one_at_the_edge(tmp_path, monkeypatch):
    """Without a cap, a refused allocation may have broken torch's allocator, which a health check may miss."""
    monkeypatch.setenv("RECORD", str(tmp_path / "calls"))
    assert probe(records_processes, min_batch=8, resolution=0.2).batch_size == ROOM
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    refused = [number for number, (size, _) in enumerate(calls) if int(size) > ROOM]
    assert refused
    for number in refused:
        assert calls[number][1] not in {pid for _, pid in calls[number + 1 :]}


# --- processes that die, or hang, while the memory is measured ---


def test_a_death_while_measuring_loses_no_confirmed_answer():
    assert check_target(named(killed_measuring), 8, device=CARD, memory_fraction=0.9, progress="off").batch_size == 8


@pytest.mark.parametrize(
    ("target", "options", "error", "words", "passed"),
    [
        (always_killed_measuring, {}, UnreliableError, "two processes failed while they measured the memory", 0),
        (
            hanging_measuring,
            {"time_limit_s": 2.5},
            TimeLimitError,
            "time passed while the memory was measured, after ",
            1,
        ),
    ],
)
def test_an_end_while_measuring_is_told_as_such(target, options, error, words, passed):
    with pytest.raises(error, match=words) as told:
        check_target(named(target), 8, device=CARD, progress="off", **options)
    assert [t.verdict for t in told.value.trials] == [Verdict.FITS] * passed


# --- processes that die ---


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (killed, "killed by SIGKILL (not by the system's OOM killer)"),
        (exited, "exited with code 1 before it answered\nthe end of its stderr:\na library: licence server not found"),
    ],
)
def test_a_death_that_is_not_about_memory_is_a_failed_step(target, words):
    with pytest.raises(StepFailedError) as failed:
        probe(target)
    assert words in str(failed.value)
    assert failed.value.batch_size == 8
    assert [t.verdict for t in failed.value.trials] == [Verdict.FITS] * 3 + [Verdict.CRASHED] * 2


@pytest.mark.parametrize(
    ("target", "options", "error", "what"),
    [
        (killed_at_nine, {}, StepFailedError, "the process of the trial died twice at batch size 9 with no sign"),
        (hanging_at_nine, {"trial_time_limit_s": 1.5}, TimeLimitError, "time passed during batch 9, in trial "),
    ],
)
def test_a_late_end_says_what_ran_and_what_failed(target, options, error, what):
    """Ten samples fit: 3, 6, not 12, and then 9."""
    with pytest.raises(error) as late:
        probe(target, min_batch=3, multiple_of=3, **options)
    assert str(late.value).startswith(f"after batch 6 ran for 2 steps and batch 12 failed, {what}")


class Nested(torch.nn.Module):
    def forward(self, fault):
        return fault()


def aborted():
    """Abort below ten nested modules: faulthandler's trace after the library's message is longer than what is searched."""
    nested = Nested()
    for _ in range(10):
        nested = torch.nn.Sequential(nested)
    return at(5, lambda: nested(aborts_for_memory))


@pytest.mark.parametrize(("target", "limited_by"), [(exited_out_of_memory, "memory"), (aborted, "host_memory")])
def test_a_death_caused_by_memory_limits_the_size(target, limited_by):
    result = probe(target, min_batch=4, max_batch=5)
    assert (result.batch_size, result.first_failing_batch_size, result.limited_by) == (4, 5, limited_by)


# --- steps that hang ---


def test_a_hanging_step_ends_at_its_time_limit():
    began = time.monotonic()
    with pytest.raises(TimeLimitError, match="time passed during batch") as late:
        probe(sleeping_in_c, trial_time_limit_s=1.5)
    assert time.monotonic() - began < 1.5 + GRACE_S
    verdicts = [(t.batch_size, t.verdict) for t in late.value.trials[:3]]
    assert verdicts == [(1, Verdict.FITS), (2, Verdict.FITS), (4, Verdict.TIMED_OUT)]
    assert late.value.trials[2].where.startswith("test_processes.py:")


def fails_late():
    """Return a target with a bug after 38 calls in one process, counted where no probe can put it back."""
    calls = iter(range(38))
    return trained(lambda batch_size: next(calls))


def test_a_bug_that_does_not_recur_in_a_new_process_is_noted():
    result = probe_target(fails_late, **isolated, max_batch=4, confirm_steps=3)
    assert result.batch_size == 4
    (note,) = [note for note in result.notes if "in a process that had run other trials" in note]
    assert "failed with StopIteration" in note
    assert note.endswith("and ran in a new one: the step does not begin anew in each trial")


@pytest.mark.parametrize(
    ("target", "options", "verdict"),
    [(killed_once, {}, Verdict.CRASHED), (hangs_once, {"trial_time_limit_s": 1.5}, Verdict.TIMED_OUT)],
)
def test_a_death_or_hang_that_does_not_recur_is_noted(tmp_path, monkeypatch, target, options, verdict):
    monkeypatch.setenv("ONCE", str(tmp_path / "happened"))
    result = probe(target, min_batch=4, max_batch=8, **options)
    assert (tmp_path / "happened").exists()
    assert result.batch_size == 8
    assert any("tried again in a new one" in note and "batch 8" in note for note in result.notes)
    assert verdict in [t.verdict for t in result.trials]


def threads_started():
    torch.set_num_threads(2)
    torch.ones(2**22).add_(1)  # starts threads, which children forked later do not have
    return trained()


def workers_started():
    worker = multiprocessing.Process(target=time.sleep, args=(600,), daemon=True)
    worker.start()
    return trained()


@pytest.mark.usefixtures("spawned")
def test_a_target_that_started_threads_is_forked():
    result = probe_target(threads_started, device="cpu:1GiB", max_batch=2, progress="off")
    assert (result.batch_size, result.limited_by) == (2, "max_batch")


@pytest.mark.usefixtures("spawned")
def test_a_target_that_started_workers_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"live child processes \(.*start them in the step"):
        probe_target(workers_started, device="cpu:1GiB", max_batch=2, progress="off")


# --- targets and devices that cannot reach another process ---


class Trainer:
    def build(self): ...


def closure():
    def build(): ...

    return build


class Unpicklable(type(CARD)):
    def __reduce__(self):
        raise TypeError("a socket in it")


@pytest.mark.parametrize("target", [lambda: None, closure(), Trainer().build, Trainer.build, Trainer(), 7, None])
def test_a_target_that_cannot_be_imported_is_refused(target):
    words = r"cannot be imported in another process.*top level of a file.*path/to/train\.py:build"
    with pytest.raises(InvalidArgumentError, match=words):
        probe_target(target, **isolated)


def test_an_unpicklable_device_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"a socket in it.*isolate=False"):
        probe(poisoned, device=Unpicklable(CARD.fake))


# --- processes that a step starts ---

SLEEP = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def starts_workers():
    """Start three: two ignore SIGTERM, and one of these leads its own session."""
    for program, own_session in ((SLEEP, False), (STUBBORN, False), (STUBBORN, True)):
        worker = subprocess.Popen([sys.executable, "-c", program], start_new_session=own_session)
        worker.returncode = 0  # no ResourceWarning


def workers():
    started = Log()  # in this process

    def start():
        if not started:
            started.append(True)
            starts_workers()

    return at(2, start)


@pytest.mark.usefixtures("spawned")
def test_no_grandchild_outlives_an_answer(mark):
    seen = []
    result = probe(workers, max_batch=2, progress=lambda trial: seen.append(marked(mark)))
    assert result.batch_size == 2
    assert sum("SIG_IGN" in command for command in seen[-1].values()) >= 2
    assert not marked(mark)


# --- a CUDA context in the parent would take memory from the trials ---


def asks_for_cuda():
    assert torch.cuda.is_available() == torch.accelerator.is_available()
    return trained()


@pytest.mark.usefixtures("spawned")
def test_only_children_touch_the_accelerator(monkeypatch):
    asked = []
    for name in ("is_available", "_lazy_init", "init", "device_count", "current_device", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: asked.append(name))
    for name in ("is_available", "current_accelerator", "device_count"):
        monkeypatch.setattr(torch.accelerator, name, lambda *_, name=name: asked.append(name))
    assert probe_target(asks_for_cuda, device=CARD, max_batch=4, progress="off").batch_size == 4
    with pytest.raises(NoDeviceError):
        probe_target(asks_for_cuda, device="cuda:7", max_batch=4, progress="off")
    assert asked == []
    asks_for_cuda()
    assert asked != []  # the patched functions do record
