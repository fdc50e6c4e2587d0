"""Device faults, other processes on the card, and processes that die, with torch's CUDA code."""

import itertools
import os
import re
import time
from pathlib import Path

import pytest
import torch
from bed import ILLEGAL_ADDRESS, fail, forked, holding
from helpers import find_hastily
from ledger import Log
from workers.forks import install
from zoo import mlp, target

import oomprobe
from oomprobe.devices.sharing import processes_on
from oomprobe.records.patience import Patience

MIB, GIB = 2**20, 2**30
QUIET = {"progress": "off"}
ASSERT, OUT_OF_MEMORY = 710, 2


def acting(act):
    """Return the MLP and its step, which first calls `act(call, batch_size)`; calls are counted from 1."""
    model, inner = mlp()
    calls = itertools.count(1)

    def step(model, batch_size):
        act(next(calls), batch_size)
        torch.zeros(1).cuda()
        inner(model, batch_size)

    return model, step


@pytest.mark.parametrize(("what", "code"), [("launch", ILLEGAL_ADDRESS), ("sync", ASSERT)])
def test_a_sticky_error_ends_the_probe(what, code):
    def probe():
        counted = []

        def act(call, size):
            counted.append(call)
            if size == 2:
                fail(what, code=code)

        with pytest.raises(
            oomprobe.DeviceLostError, match=r"save it before you probe.*oomprobe run"
        ) as caught:
            oomprobe.find_max_batch(*acting(act), **QUIET)
        return caught.value.trials[-1].batch_size, counted

    assert forked(probe) == (2, [])  # what is on the host comes back


def over_half_of_the_card():
    """Return a tensor that torch would copy to print it."""
    return torch.zeros(GIB * 5 // 4 // 8, dtype=torch.complex64, device="cuda").conj()


TENSOR = "a tensor of shape (167772160,), torch.complex64, on cuda:0"


def test_telling_an_error_takes_no_memory_on_the_device():
    def probe():
        model, inner = mlp()

        def step(model, batch_size):
            inner(model, batch_size)
            raise KeyError(over_half_of_the_card())

        with pytest.raises(
            oomprobe.StepFailedError, match=re.escape(f"with KeyError: {TENSOR}")
        ) as caught:
            oomprobe.find_max_batch(model, step, max_batch=4, **QUIET)
        return type(caught.value.__cause__) is KeyError, torch.cuda.memory_stats()["num_ooms"]

    assert forked(probe, memory="2GiB") == (True, 0)


def test_a_device_lost_while_the_state_is_restored():
    """The error has the trials, whichever copy of the probe fails."""

    def probe(in_calls):
        model, step = mlp()
        calls = Log()

        def last(model, batch_size):
            step(model, batch_size)
            calls.append(batch_size)
            if len(calls) == 2 + 50:  # the last call of the confirmation
                fail("memcpy", in_calls=in_calls)

        try:
            oomprobe.find_max_batch(model, last, max_batch=1, **QUIET)
        except oomprobe.DeviceLostError as error:
            return len(error.trials)

    found = {forked(probe, in_calls) for in_calls in (1, 13, 37)}
    assert {2} <= found <= {None, 2}


def test_an_out_of_memory_that_does_not_recur_is_ignored():
    def probe():
        passing = acting(
            lambda call, size: call == 1 and fail("malloc", in_calls=2, code=OUT_OF_MEMORY)
        )
        result = oomprobe.find_max_batch(*passing, max_batch=64, **QUIET)
        return result.batch_size, result.trials[0].alloc_retries

    assert forked(probe) == (64, 1)


@pytest.mark.parametrize(
    ("size", "trials", "available_mib"), [(4096, 2, 8192 - 300 - 700), (2**21, 2, None)]
)
def test_memory_of_kernels_is_not_taken_for_a_neighbour(size, trials, available_mib):
    """On an 8 GiB card kernels take a tenth at their first launch: the probe samples after it, and does not wait."""

    def probe():
        began = time.monotonic()
        try:
            ran = oomprobe.check(*mlp(), size, memory_fraction=1.0, **QUIET)
        except oomprobe.NothingFitsError as error:
            return len(error.trials), time.monotonic() - began < 10, None
        return len(ran.trials), time.monotonic() - began < 10, ran.available_bytes // MIB

    assert forked(probe, memory="8GiB", context="300MiB", lazy="700MiB") == (
        trials,
        True,
        available_mib,
    )


@pytest.fixture
def neighbour(tmp_path):
    """The file from which the bed reads how many bytes another process holds."""
    path = tmp_path / "held"
    path.write_text("0")
    return path


def test_a_neighbour_that_takes_and_gives_back(neighbour):
    def probe(moves):
        def move(call, size):
            if moves:
                neighbour.write_text(f"{3 * GIB if size > 2**16 and not waiting else 0}")

        def wait(seconds):
            waiting.append(torch.cuda.memory_allocated())
            neighbour.write_text("0")

        waiting, (model, step) = Log(), acting(move)
        built_bytes = torch.cuda.memory_allocated()
        result = find_hastily(Patience(sleep=wait), model, step, resolution=0.02)
        assert (len(waiting) > 0) is moves
        assert all(
            held_bytes <= built_bytes for held_bytes in waiting
        )  # nothing of the trial is alive
        return result.batch_size, result.contaminated

    alone = forked(probe, False, memory="8GiB", neighbour=neighbour)
    assert forked(probe, True, memory="8GiB", neighbour=neighbour) == alone == (alone[0], False)


@pytest.mark.parametrize("call", [0, 1])
def test_a_neighbour_is_named_that_was_there_or_came_early(neighbour, call):
    """On an H200, one that came during the first trial left 6 of 140 GiB to a probe that did not say why."""

    def probe():
        if call == 0:
            neighbour.write_text(f"{3 * GIB}")
        came = acting(lambda number, size: number == call and neighbour.write_text(f"{3 * GIB}"))
        return oomprobe.find_max_batch(*came, max_batch=64, **QUIET).notes

    [note] = [
        one
        for one in forked(probe, memory="8GiB", neighbour=neighbour)
        if "for what that leaves" in one
    ]
    assert note.startswith("3.00 GiB of the device were in use outside this process's allocator")


def test_a_neighbour_that_leaves_room_is_not_waited_for(neighbour):
    def probe():
        model, inner = mlp()

        def step(model, batch_size):
            try:
                inner(model, batch_size)
            except torch.OutOfMemoryError:
                if torch.cuda.get_per_process_memory_fraction() < 0.6:
                    neighbour.write_text(f"{3 * GIB}")
                raise

        slept = []
        result = find_hastily(
            Patience(sleep=slept.append), model, step, memory_fraction=0.5, resolution=0.02
        )
        assert sum(not trial.passed for trial in result.trials) >= 5
        assert any("allocator grew by" in note for note in result.notes)
        return result.contaminated, len(slept)

    assert forked(probe, memory="8GiB", neighbour=neighbour) == (False, 0)


def test_processes_share_a_card(tmp_path):
    def probe():
        result = oomprobe.find_max_batch(*mlp(), resolution=0.02, **QUIET)
        return (
            result.available_bytes,
            result.trials[-1].peak_reserved_bytes,
            processes_on(torch.device("cuda")),
        )

    bed = {"memory": "4GiB", "shared": tmp_path / "card"}
    with holding(
        tmp_path, lambda: torch.empty(GIB, dtype=torch.uint8, device="cuda"), **bed
    ) as holder:
        available_bytes, peak_bytes, named = forked(probe, **bed)
    assert (
        named
        == f"pid {holder.pid} ({Path(f'/proc/{os.getpid()}/comm').read_text().strip()}) holds 1024 MiB"
    )
    assert available_bytes == 3 * GIB
    assert 0.8 * 3 * GIB < peak_bytes <= 0.9 * 3 * GIB


def test_workers_with_a_sticky_error_are_replaced(tmp_path):
    def probe():
        install()
        faulty = target(tmp_path, "batch_size >= 1000 and fail('launch')")
        return oomprobe.probe_target(
            faulty, device="cuda", resolution=0.1, max_batch=4096, **QUIET
        ).to_dict()

    result = forked(probe)
    assert result["limited_by"] == "size_limit"
    assert 900 <= result["batch_size"] < 1000


def test_workers_forked_before_cuda_was_used_agree_with_one_process(tmp_path):
    """At import, as scripts do, the target asks whether there is CUDA; each worker asks anew."""
    name = target(tmp_path)
    file = Path(name.rpartition(":")[0])
    file.write_text(
        f"import torch\ndevice = 'cuda' if torch.cuda.is_available() else 1 / 0\n{file.read_text()}"
    )
    options = {"resolution": 0.02, **QUIET}

    def probed():
        return oomprobe.probe_target(
            name, device="cuda", **options
        ).to_dict(), torch.cuda.is_initialized()

    result, initialised = forked(probed, limit_s=120)
    expected = forked(lambda: oomprobe.find_max_batch(*mlp(), **options).to_dict())
    assert result["environment"]["workers"] == "forked from a process that has made the imports"
    assert (initialised, result["contaminated"]) == (False, False)
    assert (result["batch_size"], result["budget_bytes"]) == (
        expected["batch_size"],
        expected["budget_bytes"],
    )
