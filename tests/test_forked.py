import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oomprobe.devices.forked import ForkedHostDevice, Growth
from oomprobe.devices.host import HostDevice

MIB = 2**20
TESTS = Path(__file__).parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="host memory is probed on Linux only")


def device(**fields):
    return ForkedHostDevice(HostDevice(256 * MIB), **{"state_bytes": lambda: 0, **fields})


def holds(act, *arguments):
    """Whether a function of this file is true in a process of its own, with one thread."""
    code = f"import test_forked as t; raise SystemExit(0 if t.{act.__name__}(*{arguments!r}) else 9)"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=120, check=False)
    assert done.returncode in (0, 9)
    return done.returncode == 0


def allocates(size_mib, held_mib, space_mib):
    forked = device(growth=Growth(space_bytes=space_mib * MIB))
    try:
        with forked.cap(None if held_mib is None else held_mib * MIB):
            torch.ones(size_mib * MIB // 4)
    except RuntimeError:
        return False
    return torch.ones(300 * MIB // 4).numel() > 0  # lifted again


@pytest.mark.parametrize(
    ("size_mib", "held_mib", "space_mib", "fits"),
    [
        (90, 100, 0, True),
        (110, 100, 0, False),
        (240, None, 0, True),
        (270, None, 0, False),
        (140, 100, 50, True),
        (160, 100, 50, False),
    ],
)
def test_the_cap_holds_for_real_beside_what_a_warm_process_has(size_mib, held_mib, space_mib, fits):
    assert holds(allocates, size_mib, held_mib, space_mib) is fits


def grows_by_what_stays():
    kept = []
    grown = device().grown_by(lambda: (kept.append(torch.ones(40 * MIB // 4)), torch.ones(80 * MIB // 4)))
    return 38 <= grown.space_bytes / MIB < 50 and 40 <= grown.live_bytes / MIB < 50


def grows_into_holes():
    blocks = [torch.ones(16 * 1024) for _ in range(1600)]  # 64 KiB each: of the heap
    del blocks[::2]
    kept = []
    grown = device().grown_by(lambda: kept.extend(torch.ones(12 * 1024) for _ in range(600)))
    return grown.space_bytes <= 5 * MIB  # 28 MiB went into the holes, which are larger


def peaks_begin_at_the_warm_process():
    forked = device(growth=Growth(resident_bytes=10 * MIB))
    forked.start_trial()
    torch.ones(60 * MIB // 4)
    return 45 <= forked.usage().peak_allocated_bytes / MIB <= 60


def tells_pressure():
    forked = device()
    with forked.cap(100 * MIB):
        calm = not forked.usage().under_pressure
        held = torch.ones(60 * MIB // 4)
        return calm and forked.usage().under_pressure and held.numel() > 0


@pytest.mark.parametrize(
    "act", [grows_by_what_stays, grows_into_holes, peaks_begin_at_the_warm_process, tells_pressure]
)
def test_in_a_process_of_its_own(act):
    assert holds(act)


def test_growth_of_optimizer_state_is_no_leak():
    state, kept = [0], []
    forked = device(state_bytes=lambda: state[0])

    def step():
        kept.append(torch.ones(8 * MIB // 4))
        state[0] = 8 * MIB

    assert forked.grown_by(step).live_bytes < MIB


def test_it_answers_like_a_device():
    from oomprobe.devices import Device

    forked = device(available_bytes=7)
    assert isinstance(forked, Device)
    assert (forked.available_bytes(), forked.outside_bytes(), forked.on_host, forked.healthy()) == (7, None, True, True)
    assert forked.name == "host memory, 256.00 MiB of it"
