import os
import sys

import pytest
import torch

from oomprobe.devices.forked import ForkedHostDevice, Growth
from oomprobe.devices.host import HostDevice

MIB = 2**20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="host memory is probed on Linux only")


def device(**fields):
    return ForkedHostDevice(HostDevice(256 * MIB), **{"state_bytes": lambda: 0, **fields})


def in_child(act):
    """Run in a process of its own; what it returns, a byte at most."""
    pid = os.fork()
    if not pid:
        code = 99
        try:
            code = int(act())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def runs(size_mib, held=None, **fields):
    def act():
        with device(**fields).cap(None if held is None else held * MIB):
            torch.ones(size_mib * MIB // 4)

    def tried():
        try:
            act()
        except RuntimeError:
            return 1
        return 0

    return in_child(tried) == 0


def test_the_cap_holds_for_real_and_is_lifted():
    assert runs(90, held=100)
    assert not runs(110, held=100)
    assert runs(240)
    assert not runs(270)


def test_what_a_warm_process_has_is_granted_beside_it():
    assert runs(140, held=100, growth=Growth(space_bytes=50 * MIB))
    assert not runs(160, held=100, growth=Growth(space_bytes=50 * MIB))


def test_growth_is_what_stays():
    kept = []

    def act():
        grown = device().grown_by(lambda: (kept.append(torch.ones(40 * MIB // 4)), torch.ones(80 * MIB // 4)))
        return not (38 <= grown.space_bytes / MIB < 50 and 40 <= grown.live_bytes / MIB < 50)

    assert in_child(act) == 0


def test_what_goes_into_holes_of_the_heap_is_not_granted_beside_the_cap():
    def act():
        blocks = [torch.ones(16 * 1024) for _ in range(1600)]  # 64 KiB each: of the heap
        del blocks[::2]
        kept = []
        grown = device().grown_by(lambda: kept.extend(torch.ones(16 * 1024) for _ in range(600)))
        return grown.space_bytes > 5 * MIB  # 37.5 MiB went into the holes

    assert in_child(act) == 0


def test_growth_of_optimizer_state_is_no_leak():
    state, kept = [0], []
    forked = device(state_bytes=lambda: state[0])

    def step():
        kept.append(torch.ones(8 * MIB // 4))
        state[0] = 8 * MIB

    assert forked.grown_by(step).live_bytes < MIB


def test_peaks_begin_at_the_warm_process():
    def act():
        forked = device(growth=Growth(resident_bytes=10 * MIB))
        forked.start_trial()
        torch.ones(60 * MIB // 4)
        return not 45 <= forked.usage().peak_allocated_bytes / MIB <= 60

    assert in_child(act) == 0


def test_pressure():
    def act():
        forked = device()
        with forked.cap(100 * MIB):
            calm = forked.usage().under_pressure
            held = torch.ones(60 * MIB // 4)
            return calm or not forked.usage().under_pressure or not held.numel()

    assert in_child(act) == 0


def test_it_answers_like_a_device():
    from oomprobe.devices import Device

    forked = device(available_bytes=7)
    assert isinstance(forked, Device)
    assert (forked.available_bytes(), forked.outside_bytes(), forked.on_host, forked.healthy()) == (7, None, True, True)
    assert forked.name == "host memory, 256.00 MiB of it"
