"""One run of a probe, in a process of its own that was forked for it; its report is a file."""

import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path

import numpy
import torch

import oomprobe
from oomprobe.workbench import Workbench
from soaking import faults, ledger, surroundings, targets
from soaking.plan import HERE, HOST, IN_FILE
from soaking.processes import MARK, prctl

HELD = {signal.SIGINT, signal.SIGTERM}
HOST_BUDGET = 200 * 2**20
started = set()  # processes that are waited for where they were started


def warm():
    """Let torch import what a first optimizer needs, before processes are forked; the one thread stays the only one."""
    model, step = targets.on_card({"fixed": 2**20, "per_sample": 2**20, "stair": 0, "stride": 1})
    oomprobe.find_max_batch(model, step, device=ledger.Card(2**24), progress="off")
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork of this process may hang"


def start(place):
    """Fork, and run what `place` says; gives the process id."""
    pid = os.fork()
    if pid:
        started.add(pid)
        return pid
    code = 70
    try:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _redirect(place)
        code = run(place)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def survives(batch_size, budget_bytes):
    """Whether a fresh process takes six steps of the host model within a budget."""
    pid = os.fork()
    if pid:
        started.add(pid)
        return os.waitpid(pid, 0)[1] == 0
    try:
        targets.survives(batch_size, budget_bytes)
        os._exit(0)
    except BaseException:
        os._exit(1)


def _redirect(place):
    for end, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, f"{place}/out", os.O_WRONLY),
        (2, f"{place}/err", os.O_WRONLY),
    ):
        fd = os.open(name, flags | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, end)
        os.close(fd)


def run(place):
    """Prepare, probe, look what was left, report."""
    said = json.loads(Path(place, "run.json").read_text())
    os.environ[MARK] = str(place)
    os.environ["TMPDIR"] = said["temporary"]
    os.environ["OMP_NUM_THREADS"] = "2"  # of the processes that it starts
    random.seed(said["seed"])
    numpy.random.seed(said["seed"] % 2**32)
    torch.manual_seed(said["seed"])
    Workbench.__init__.__kwdefaults__["sleep"] = lambda seconds: time.sleep(seconds / 400)  # its clock is an argument
    call, model, optimizer = _prepared(said)
    journal = said["options"].get("journal")
    disk = faults.Disk(journal) if journal and any(f["kind"] in IN_FILE for f in said["faults"]) else nullcontext()
    limited = _limit_files(said)
    before = surroundings.look(model, optimizer)
    with disk:
        report, code = _probed(call)
    report["ended_s"] = time.monotonic()
    before["blocked"] = sorted(map(int, HELD))
    report["left"] = surroundings.differences(before, surroundings.look(model, optimizer))
    if limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    report["late"] = sorted(signal.Signals(number).name for number in signal.sigpending() & HELD)
    Path(place, "report.part").write_text(json.dumps(report, default=str))
    os.rename(f"{place}/report.part", f"{place}/report.json")
    return code


def _limit_files(said):
    for fault in said["faults"]:
        if fault["kind"] == "file_limit":
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (fault["bytes"], hard))
            return True
    return False


def _prepared(said):
    """The call to make, and a model and an optimizer that it has to leave alone."""
    options = {"progress": _Watcher(said["place"]), **said["options"]}
    build = targets.on_host if said["probe_kind"] == HOST else targets.on_ledger
    model, step = build()
    if said["probe_kind"] == HOST:
        return (
            (lambda: oomprobe.probe_target("soaking.targets:on_host", device=f"cpu:{HOST_BUDGET}B", **options)),
            model,
            step.optimizer,
        )
    card = ledger.Card(said["card"]["total"])
    if said["probe_kind"] == HERE:
        return (lambda: oomprobe.find_max_batch(model, step, device=card, **options)), model, step.optimizer
    return (lambda: oomprobe.probe_target("soaking.targets:on_ledger", device=card, **options)), model, step.optimizer


class _Watcher:
    """Told of each trial; leaves a file once a size was confirmed."""

    def __init__(self, place):
        self._place = place

    def __call__(self, trial):
        faults.count(self._place, "trials")
        if trial.phase == "confirm" and trial.passed:
            faults.count(self._place, "confirmed")


def _probed(call):
    """What came out, as JSON types; and the exit code it stands for. Signals that come afterwards are held back."""
    try:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
            result = call()
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    except KeyboardInterrupt:
        return {"how": "interrupted"}, 130
    except SystemExit as leaving:
        return {"how": "left"}, int(leaving.code)
    except BaseException as error:
        return {
            "how": "error",
            "classes": [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__],
            "text": str(error)[:2000],
            "traceback": "".join(traceback.format_exception(error))[-6000:],
            "trials": _trials(getattr(error, "trials", ())),
        }, 3
    return {
        "how": "answer",
        "batch_size": result.batch_size,
        "contaminated": result.contaminated,
        "budget_bytes": result.budget_bytes,
        "notes": list(result.notes),
        "verified": result.state_verified,
        "trials": _trials(result.trials),
    }, 0


def _trials(trials):
    names = ("batch_size", "phase", "verdict", "cap_bytes", "leaked_bytes", "error", "steps")
    return [{name: getattr(trial, name) for name in names} for trial in trials]
