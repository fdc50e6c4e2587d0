"""Trials that end their process, hang it, poison it or leave something running."""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from faults.card import CARD, trained
from faults.processes import marked, until
from oomprobe import (
    InvalidArgumentError,
    NoDeviceError,
    StepFailedError,
    TimeLimitError,
    Verdict,
    probe_target,
)

POISONED_FROM = 6
GRACE_S = 40  # for a process to start, and for one that hangs to be ended, on a busy machine
isolated = {"device": CARD, "memory_fraction": 1.0, "progress": "off"}


def at(size, fault):
    """A target with a fault from a size on."""
    return trained(lambda batch_size: batch_size >= size and fault())


def once(fault):
    """The first time in any process."""

    def only_once():
        first = Path(os.environ["ONCE"])
        if not first.exists():
            first.touch()
            fault()

    return only_once


# --- 5: a poisoned process gives no further verdict ---


def illegal_access():
    CARD.fake.poison()
    CARD.fake.synchronize()


def poisoned():
    return at(POISONED_FROM, illegal_access)


def test_row_05_a_new_process_goes_on():
    result = probe_target(poisoned, min_batch=POISONED_FROM - 2, max_batch=POISONED_FROM, **isolated)
    assert (result.batch_size, result.limited_by) == (POISONED_FROM - 1, "size_limit")
    assert any("sticky error in two processes" in note for note in result.notes)
    assert {t.batch_size for t in result.trials if t.verdict is Verdict.POISONED} == {POISONED_FROM}


# --- 16: processes that die ---


def sigkill():
    os.kill(os.getpid(), signal.SIGKILL)


def killed():
    return at(5, sigkill)


def leaves():
    os.write(2, b"a library: licence server not found\n")
    os._exit(1)


def left():
    return at(5, leaves)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (killed, "killed by SIGKILL (not by the system's OOM killer)"),
        (left, "exited with code 1 before it answered\nthe end of its stderr:\na library: licence server not found"),
    ],
)
def test_row_16_a_death_that_is_not_of_memory_is_no_ceiling(target, said):
    with pytest.raises(StepFailedError) as failed:
        probe_target(target, **isolated)
    assert said in str(failed.value)
    assert failed.value.batch_size == 8
    assert [t.verdict for t in failed.value.trials] == [Verdict.FITS] * 3 + [Verdict.CRASHED] * 2


def says_out_of_memory():
    os.write(2, b"CUDA Setup failed: out of memory at line 380 in csrc/ops.cu\n")
    os._exit(1)


def left_for_memory():
    return at(5, says_out_of_memory)


def aborts_for_memory():
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
    os.abort()


class Nested(torch.nn.Module):
    def forward(self, fault):
        return fault()


def aborted():
    """Python's own trace comes after the words, and is longer than what is read of them: ten levels of three frames each."""
    nested = Nested()
    for _ in range(10):
        nested = torch.nn.Sequential(nested)
    return at(5, lambda: nested(aborts_for_memory))


@pytest.mark.parametrize(("target", "limited_by"), [(left_for_memory, "memory"), (aborted, "host_memory")])
def test_row_16_a_death_for_want_of_memory_is_a_ceiling(target, limited_by):
    result = probe_target(target, min_batch=4, max_batch=5, **isolated)
    assert (result.batch_size, result.first_failing_batch_size, result.limited_by) == (4, 5, limited_by)


# --- 17: steps that hang ---


def sleeps_in_c():
    ctypes.PyDLL(None).sleep(600)  # holds the interpreter: no signal handler of Python runs


def sleeping_in_c():
    return at(4, sleeps_in_c)


def test_row_17_a_step_that_hangs_ends_with_its_time():
    began = time.monotonic()
    with pytest.raises(TimeLimitError, match="time passed during batch") as late:
        probe_target(sleeping_in_c, trial_time_limit_s=3, **isolated)
    assert time.monotonic() - began < 3 + GRACE_S
    verdicts = [(t.batch_size, t.verdict) for t in late.value.trials[:3]]
    assert verdicts == [(1, Verdict.FITS), (2, Verdict.FITS), (4, Verdict.TIMED_OUT)]
    assert late.value.trials[2].where.startswith("test_processes.py:")


def killed_once():
    return at(7, once(sigkill))


def hangs_once():
    return at(7, once(sleeps_in_c))


@pytest.mark.parametrize(
    ("target", "options", "verdict"),
    [(killed_once, {}, Verdict.CRASHED), (hangs_once, {"trial_time_limit_s": 3}, Verdict.TIMED_OUT)],
)
def test_row_17_what_happens_once_is_tried_again(tmp_path, monkeypatch, target, options, verdict):
    monkeypatch.setenv("ONCE", str(tmp_path / "happened"))
    result = probe_target(target, min_batch=4, max_batch=8, **options, **isolated)
    assert (tmp_path / "happened").exists()
    assert result.batch_size == 8
    assert any("tried again in a new one" in note and "batch 8" in note for note in result.notes)
    assert verdict in [t.verdict for t in result.trials]


def threads_started():
    torch.set_num_threads(2)
    torch.ones(2**22).add_(1)  # a parallel region: children forked from now on have no such threads
    return trained()


def workers_started():
    """As those of a data loader, which only the process that started them can ask."""
    worker = multiprocessing.Process(target=time.sleep, args=(600,), daemon=True)
    worker.start()
    return trained(lambda batch_size: worker.is_alive())


def test_row_17_a_target_that_started_threads_is_forked():
    result = probe_target(threads_started, device="cpu:1GiB", max_batch=2, progress="off")
    assert (result.batch_size, result.limited_by) == (2, "max_batch")


def test_row_17_a_target_that_started_workers_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"live child processes \(.*start them in the step"):
        probe_target(workers_started, device="cpu:1GiB", max_batch=2, progress="off")


# --- 22: what cannot be had in another process ---


class Trainer:
    def build(self): ...


def closure():
    def build(): ...

    return build


class Unpicklable(type(CARD)):
    def __reduce__(self):
        raise TypeError("a socket in it")


@pytest.mark.parametrize("target", [lambda: None, closure(), Trainer().build, Trainer.build, Trainer(), 7, None])
def test_row_22_what_cannot_be_imported_is_refused(target):
    said = r"cannot be imported in another process.*top level of a file.*path/to/train\.py:build"
    with pytest.raises(InvalidArgumentError, match=said):
        probe_target(target, **isolated)


def healthy():
    return trained()


def test_row_22_an_unpicklable_device_is_refused():
    device = Unpicklable(CARD.fake)
    with pytest.raises(InvalidArgumentError, match=r"a socket in it.*isolate=False"):
        probe_target(healthy, **{**isolated, "device": device})


# --- 23: nothing is left running (the fixture of all tests here looks for what is) ---

SLEEP = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def has_workers():
    """Three that nobody waits for: one ignores SIGTERM, one leads a session of its own."""
    for program, own_session in ((SLEEP, False), (STUBBORN, False), (STUBBORN, True)):
        worker = subprocess.Popen([sys.executable, "-c", program], start_new_session=own_session)
        worker.returncode = 0  # no warning about it


def workers():
    return at(2, has_workers)


def test_row_23_no_grandchild_outlives_an_answer(mark):
    seen = []
    result = probe_target(workers, max_batch=2, **{**isolated, "progress": lambda trial: seen.append(marked(mark))})
    assert result.batch_size == 2
    assert sum("SIG_IGN" in command for command in seen[-1].values()) >= 2
    assert not marked(mark)


# --- 5 of faults.md's own sections: a context in the parent would take memory from the trials ---


def asks_for_cuda():
    assert torch.cuda.is_available() == torch.accelerator.is_available()
    return trained()


def test_row_05_only_children_touch_the_accelerator(monkeypatch):
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
    assert asked != []


def test_the_scan_for_processes_can_find_one(mark):
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as process:
        until(lambda: process.pid in marked(mark))
        process.kill()
    assert not marked(mark)
