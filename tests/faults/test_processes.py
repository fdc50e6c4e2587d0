"""Trials that kill, hang or poison their process, or leave other processes running; and the processes that confirm an answer."""

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
from ledger import Log
from processes import PATIENCE_S, environment

from faults.card import CARD, ROOM, trained
from oomprobe import (
    DeviceLostError,
    InvalidArgumentError,
    NoDeviceError,
    Phase,
    StepFailedError,
    TimeLimitError,
    UnreliableError,
    Verdict,
    check_target,
    probe_target,
)

GRACE_S = 40  # for a process to start, and for a hanging one to be terminated, on a busy machine
ILLEGAL_ADDRESS = "CUDA error: an illegal memory access was encountered"
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
    CARD.is_healthy = False
    raise torch.AcceleratorError(ILLEGAL_ADDRESS)


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


def worn_out():
    """Return a step whose optimizer does not step any more after four calls in one process."""
    model = torch.nn.Linear(2, 2)
    optimizer, calls = torch.optim.SGD(model.parameters(), lr=0.1), Log()

    def step(model, batch_size):
        calls.append(batch_size)
        model(torch.randn(batch_size, 2)).sum().backward()
        if len(calls) <= 4:
            optimizer.step()

    return model, step


poisoned = partial(at, 6, illegal_access)
# The step passes, after which the card is lost while its cache is released.
poisoned_between_steps = partial(at, 6, lambda: setattr(CARD, "release", illegal_access))
lost_from_the_start = partial(at, 1, lambda: setattr(CARD, "release", illegal_access))
killed_measuring = partial(measuring, 3, sigkill)
always_killed_measuring = partial(measuring, 1, sigkill)
hanging_measuring = partial(measuring, 3, sleeps_in_c)
exited = partial(at, 5, exits)
exited_out_of_memory = partial(at, 5, says_out_of_memory)
sleeping_in_c = partial(at, 4, sleeps_in_c)
killed_once = partial(at, 7, once(sigkill))


def named(target):
    """Return the name of a target of this module, which may be a partial."""
    return next(f"{__name__}:{name}" for name, value in globals().items() if value is target)


def probe(target, **options):
    return probe_target(named(target), **{**isolated, **options})


ONLY_LATER = "in a process that had run other trials, and ran in a new one: the step does not begin anew in each trial"
LIMITED = {"trial_time_limit_s": 1.5}
POISONED, CRASHED, TIMED_OUT = Verdict.POISONED, Verdict.CRASHED, Verdict.TIMED_OUT


@pytest.mark.parametrize(
    ("target", "options", "answer", "limited_by", "verdict", "noted"),
    [
        (poisoned, {"max_batch": 6}, 5, "size_limit", POISONED, "sticky error in two processes"),
        (
            poisoned_between_steps,
            {"max_batch": 6},
            5,
            "size_limit",
            POISONED,
            "sticky error in two processes",
        ),
        (exited_out_of_memory, {"max_batch": 5}, 4, "memory", Verdict.OOM, ""),
        (killed_once, {"max_batch": 8}, 8, "max_batch", CRASHED, "tried again in a new one"),
        (worn_out, {"min_batch": 1, "max_batch": 4}, 4, "max_batch", Verdict.FITS, ONLY_LATER),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_answer_in_spite_of_processes_that_end(
    tmp_path, monkeypatch, target, options, answer, limited_by, verdict, noted
):
    monkeypatch.setenv("ONCE", str(tmp_path / "happened"))
    result = probe(target, **{"min_batch": 4, **options})
    assert (result.batch_size, result.limited_by) == (answer, limited_by)
    assert verdict in {trial.verdict for trial in result.trials}
    assert not noted or any(noted in note for note in result.notes)
    lost = {(trial.batch_size, trial.error) for trial in result.trials if trial.verdict is POISONED}
    assert lost <= {(6, f"AcceleratorError: {ILLEGAL_ADDRESS}")}


PASSED = [Verdict.FITS] * 3  # 1, 2 and 4


@pytest.mark.parametrize(
    ("target", "options", "error", "words", "verdicts"),
    [
        (
            lost_from_the_start,
            {},
            DeviceLostError,
            "a fresh process hit the same error",
            [POISONED] * 2,
        ),
        (
            *(exited, {}, StepFailedError),
            "exited with code 1 before it answered\nthe end of its stderr:\na library: licence server not found",
            [*PASSED, CRASHED, CRASHED],
        ),
        (
            sleeping_in_c,
            LIMITED,
            TimeLimitError,
            "time passed during batch",
            [*PASSED[:2], TIMED_OUT, TIMED_OUT],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_end_that_recurs_is_told_as_such(target, options, error, words, verdicts):
    with pytest.raises(error) as told:
        probe(target, **options)
    assert words in str(told.value)
    assert [trial.verdict for trial in told.value.trials] == verdicts
    for trial in told.value.trials:
        assert trial.verdict is not TIMED_OUT or trial.where.startswith("test_processes.py:")


def test_an_end_while_measuring_loses_no_confirmed_answer():
    check = partial(check_target, batch_size=8, device=CARD, progress="off")
    assert check(named(killed_measuring)).batch_size == 8
    with pytest.raises(
        UnreliableError, match="two processes failed while they measured the memory"
    ):
        check(named(always_killed_measuring))
    with pytest.raises(
        TimeLimitError, match="time passed while the memory was measured, after "
    ) as late:
        check(named(hanging_measuring), time_limit_s=2.5)
    assert [trial.verdict for trial in late.value.trials] == [Verdict.FITS]


def hangs():
    time.sleep(600)


def test_a_hanging_target_ends_at_the_time_limit():
    began_s = time.monotonic()
    with pytest.raises(
        TimeLimitError, match=r"time passed while the target was built.* \(time_limit_s=1,"
    ):
        probe(hangs, time_limit_s=1)
    assert 1 <= time.monotonic() - began_s < GRACE_S


# --- which process runs a trial ---


def records_processes():
    def record(batch_size):
        with Path(os.environ["RECORD"]).open("a") as file:
            file.write(f"{batch_size} {os.getpid()}\n")

    model, step = trained()

    def recording(model, batch_size):
        record(batch_size)
        step(model, batch_size)

    return model, recording


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Return a function that returns the size and the process of each call of `records_processes`."""
    monkeypatch.setenv("RECORD", str(tmp_path / "calls"))
    return lambda: [
        tuple(map(int, line.split())) for line in (tmp_path / "calls").read_text().splitlines()
    ]


def test_no_process_runs_another_trial_after_one_at_the_edge(calls):
    """Without a cap, a refused allocation may have broken torch's allocator, which a health check may miss."""
    assert probe(records_processes, min_batch=8, resolution=0.2).batch_size == ROOM
    refused = [number for number, (size, _) in enumerate(calls()) if size > ROOM]
    assert refused
    for number in refused:
        assert calls()[number][1] not in {pid for _, pid in calls()[number + 1 :]}


@pytest.mark.parametrize("device", ["cpu:1GiB", CARD], ids=["host", "card"])
def test_an_answer_is_confirmed_in_a_fresh_process(calls, device):
    searched, confirmed = set(), set()

    def note_process(trial):
        if not confirmed or trial.phase is Phase.CONFIRM:  # half of the answer runs after it
            (confirmed if trial.phase is Phase.CONFIRM else searched).add(calls()[-1][1])

    probe(records_processes, device=device, max_batch=2, progress=note_process)
    assert (len(searched) > 1) is (device != CARD)  # on the host each trial has its own
    assert confirmed
    assert not confirmed & searched


# --- what a target may have started ---


def workers_started():
    worker = multiprocessing.Process(target=time.sleep, args=(600,), daemon=True)
    worker.start()
    return trained()


def test_a_target_that_started_workers_is_refused():
    with pytest.raises(
        InvalidArgumentError, match=r"live child processes \(.*start them in the step"
    ):
        probe(workers_started, device="cpu:1GiB", max_batch=2)


# --- targets and devices that cannot reach another process ---


def closure():
    def build(): ...

    return build


class Unpicklable(type(CARD)):
    def __reduce__(self):
        raise TypeError("a socket in it")


@pytest.mark.parametrize("target", [lambda: None, closure(), "".strip, 7])
def test_a_target_that_cannot_be_imported_is_refused(target):
    words = r"cannot be imported in another process.*top level of a file.*path/to/train\.py:build"
    with pytest.raises(InvalidArgumentError, match=words):
        probe_target(target, **isolated)


def test_an_unpicklable_device_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"a socket in it.*isolate=False"):
        probe(poisoned, device=Unpicklable())


SCRIPT = """
import os

import torch

import oomprobe

with open("imported", "a") as file:
    file.write(f"{os.getpid()}\\n")


def build():
    model = torch.nn.Linear(2, 2)
    return model, lambda model, batch_size: model(torch.randn(batch_size, 2)).sum().backward()


oomprobe.probe_target(build, device="cpu:1GiB", max_batch=2)
"""


def test_a_script_that_probes_itself_on_import_is_refused(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    options = {
        "env": environment(),
        "cwd": tmp_path,
        "timeout": PATIENCE_S,
        "capture_output": True,
        "text": True,
    }
    done = subprocess.run([sys.executable, "train.py"], check=False, **options)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith('put the call under if __name__ == "__main__":')
    assert "InvalidArgumentError" in done.stderr.splitlines()[-1]
    assert len((tmp_path / "imported").read_text().split()) == 2  # by the script, and by the worker


# --- a CUDA context in the parent would take memory from the trials ---


def asks_for_cuda():
    assert torch.cuda.is_available() == torch.accelerator.is_available()
    return trained()


def test_only_children_touch_the_accelerator(monkeypatch):
    asked = []
    for name in (
        "is_available",
        "_lazy_init",
        "init",
        "device_count",
        "current_device",
        "mem_get_info",
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: asked.append(name))
    for name in ("is_available", "current_accelerator", "device_count"):
        monkeypatch.setattr(torch.accelerator, name, lambda *_, name=name: asked.append(name))
    assert probe(asks_for_cuda, max_batch=4).batch_size == 4
    with pytest.raises(NoDeviceError):
        probe(asks_for_cuda, device="cuda:7", max_batch=4)
    assert asked == []
    asks_for_cuda()
    assert asked != []  # the patched functions do record
