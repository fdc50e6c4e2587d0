"""Probes of host memory: each trial is a forked child that the system limits, and this process does not change."""

import json
import os
import shutil
import sys
import time
from contextlib import nullcontext
from multiprocessing import Process

import pytest
import torch
from helpers import find_hastily
from ledger import Log
from processes import children, run_python
from torch import nn
from zoo import numbered

import oomprobe
from oomprobe.devices.host import APPROXIMATE, HostDevice, other_malloc
from oomprobe.ground import linux
from oomprobe.records.patience import Patience
from oomprobe.runners.workers import process
from oomprobe.runners.workers.process import Process as TrialProcess

MIB, GIB = 2**20, 2**30
QUIET = {"device": "cpu:128MiB", "progress": "off"}


def linear(then=lambda batch_size: None):
    """Return a model and a step that takes one MiB per sample and calls `then`."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @numbered
    def step(number, model, batch_size):
        block = torch.empty(batch_size, MIB // 4)
        if number == 1:  # in each child; further calls need not touch every page to show the same
            block.zero_()
        then(batch_size)
        optimizer.zero_grad()
        (model(torch.randn(batch_size, 4)).sum() + block[0, 0]).backward()
        optimizer.step()

    return model, step


# --- the device ---


def test_names_and_notes():
    assert (HostDevice().name, HostDevice(GIB).name) == (
        "host memory",
        "host memory, 1.00 GiB of it",
    )
    assert HostDevice(GIB).notes == (APPROXIMATE,)
    [note] = other_malloc("7f0 r-xp 0 00:00 1  /usr/lib/libjemalloc.so.2\n")
    assert "jemalloc" in note


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(oomprobe.NoDeviceError, match="this is darwin"):
        HostDevice(GIB)


def test_a_budget_above_free_memory_is_refused(monkeypatch):
    monkeypatch.setattr(linux, "free_bytes", lambda: 2 * GIB)
    said = r"8\.00 GiB of host memory requested, but only 1\.\d\d GiB can be used: state less"
    with pytest.raises(oomprobe.InvalidArgumentError, match=said):
        HostDevice(8 * GIB)


@pytest.mark.parametrize(
    "asked",
    [{}, {"device": "cpu:1GiB"}, {"time_limit_s": 600}],
    ids=["no option", "device", "limit"],
)
def test_host_memory_that_nobody_asked_for_is_said_at_once_and_ends_soon(asked, caplog):
    told = []  # before each trial
    slow = linear(then=lambda batch_size: time.sleep(0.1))
    options = {"device": None, "max_batch": 8, **asked}
    options["progress"] = lambda trial: told.append(
        [record.getMessage() for record in caplog.records]
    )
    hint = "no accelerator is here and no device was named, so host memory is probed, which is slow; such a probe ends after 1.5"
    is_unasked = "device" not in asked
    warns = pytest.warns(UserWarning, match=hint) if is_unasked else nullcontext()
    with warns:
        result = find_hastily(Patience(unasked_host_s=1.5), *slow, **options)
    assert [text.startswith(hint) for text in told[0]] == [True] * is_unasked
    assert any(note.startswith(hint) for note in result.notes) is is_unasked
    assert result.limited_by == ("max_batch" if asked else "time_limit")


# --- answers, in new processes: the free heap that earlier tests leave would serve blocks outside the budget ---


def test_one_mebibyte_per_sample_gives_the_budget_in_mebibytes():
    code = """
        import json, resource, oomprobe
        from oomprobe.ground import linux
        from test_host import MIB, QUIET, in_small_blocks, linear
        found = [
            oomprobe.find_max_batch(*linear(), resolution=0.05, **QUIET),
            oomprobe.find_max_batch(*in_small_blocks(), resolution=0.05, **QUIET),
        ]
        limit = linux.process_bytes("VmSize") + 250 * MIB  # set by the user
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        found.append(oomprobe.find_max_batch(*linear(), device="cpu:1GiB", resolution=0.02, progress="off"))
        print(json.dumps([result.to_dict() for result in found]))
    """
    result, in_blocks, limited = [
        oomprobe.ProbeResult.from_dict(result) for result in json.loads(run_python(code))
    ]
    assert 115 - 14 <= result.batch_size <= 115
    assert result.budget_bytes == int(0.9 * 128 * MIB)
    assert (
        result.state_verified,
        result.environment["isolated"],
        result.environment["threads"],
    ) == (True, True, 1)
    answered = result.trials[-1]
    assert answered.peak_allocated_bytes <= answered.peak_reserved_bytes <= result.budget_bytes
    assert (
        answered.peak_allocated_bytes >= (result.batch_size - 4) * MIB
    )  # the heap had a little free
    assert 85 <= in_blocks.batch_size <= 120
    available_mib = limited.available_bytes // MIB
    assert 100 <= available_mib <= 250
    assert 0.88 * available_mib - 30 <= limited.batch_size <= 0.9 * available_mib


def in_small_blocks():
    model, step = linear()

    def in_blocks(model, batch_size):
        blocks = [torch.empty(2**14) for _ in range(16 * batch_size)]
        step(model, 1)
        del blocks

    return model, in_blocks


# --- this process ---


@pytest.mark.parametrize("shared", [False, True])
def test_a_step_runs_in_a_child_and_changes_nothing_outside(shared):
    pids = Log()
    model, step = linear(lambda batch_size: pids.append(os.getpid()))
    if shared:
        model.share_memory()
    before, running = model.weight.detach().clone(), children()
    assert oomprobe.find_max_batch(model, step, max_batch=4, **QUIET).state_verified
    assert not pids
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None
    assert children() == running


def test_output_of_a_step_is_shown(capfd):
    oomprobe.check(*linear(lambda batch_size: os.write(1, b"from the step\n")), 2, **QUIET)
    assert "from the step" in capfd.readouterr().out


# --- faults ---


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda batch_size: sys.exit(3), r"left the process, sys\.exit\(3\)"),
        (lambda batch_size: os._exit(3), "died twice at batch size 1"),
    ],
)
def test_a_failing_step_ends_only_its_child(fault, said):
    with pytest.raises(oomprobe.StepFailedError, match=said):
        oomprobe.find_max_batch(*linear(fault), **QUIET)


def test_the_cause_of_a_bug_is_the_steps_exception():
    def bug(batch_size):
        if batch_size > 2:
            raise LookupError("no such label")

    with pytest.raises(oomprobe.StepFailedError, match="batch 2 ran: pass max_batch=2") as caught:
        oomprobe.find_max_batch(*linear(bug), **QUIET)
    assert type(caught.value.__cause__) is LookupError
    assert caught.value.batch_size == 4
    assert "in bug" in caught.value.__cause__.__notes__[0]


def test_a_child_that_hangs_is_reported_with_a_remedy():
    with pytest.raises(
        oomprobe.UnreliableError, match=r"hangs at test_host\.py:\d+.*set_num_threads.*oomprobe run"
    ):
        find_hastily(
            Patience(stuck_in_step_s=2.0), *linear(lambda batch_size: time.sleep(60)), **QUIET
        )


def test_a_child_that_has_just_started_can_be_ended(monkeypatch):
    live = process._live
    monkeypatch.setattr(process, "_live", lambda *given: (time.sleep(0.5), live(*given)))
    before = children()
    TrialProcess.forked(lambda wire: time.sleep(60)).end()
    assert children() == before


def test_a_failed_fork_is_reported(monkeypatch):
    def full():
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "fork", full)
    with pytest.raises(
        oomprobe.UnreliableError, match=r"no process could be started .*state a smaller budget"
    ):
        oomprobe.find_max_batch(*linear(), **QUIET)


def test_live_children_are_refused():
    worker = Process(target=time.sleep, args=(60,), name="worker 1")
    worker.start()
    try:
        with pytest.raises(
            oomprobe.InvalidArgumentError, match=r"live child processes \(worker 1\).*oomprobe run"
        ):
            oomprobe.find_max_batch(*linear(), **QUIET)
    finally:
        worker.kill()
        worker.join()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
def test_a_compiled_step_compiles_in_children(tmp_path):
    """The threads of the compiler's process pool do not exist in a forked child."""
    code = f"""
        import os
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = {str(tmp_path)!r}
        import torch, oomprobe
        model = torch.compile(torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        def step(model, batch_size):
            optimizer.zero_grad()
            model(torch.randn(batch_size, 8)).square().mean().backward()
            optimizer.step()
        step(model, 3)
        print(oomprobe.check(model, step, 4, device="cpu:2GiB", time_limit_s=100, progress="off").batch_size)
    """
    assert run_python(code, warnings="default") == "4\n"
