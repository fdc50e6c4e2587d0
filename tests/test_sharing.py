"""Devices that spill to the host or share its memory, Apple's GPU, and stated budgets."""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch
from fake_accelerator import MIB, FakeAccelerator, FakeModule

from oomprobe import InvalidArgumentError
from oomprobe.devices import choose_device, list_devices, mps, sharing
from oomprobe.devices.choose import describe_device
from oomprobe.devices.mps import MpsDevice
from oomprobe.ground import linux

GIB = 2**30
WITHOUT_PARAMETERS = torch.nn.ReLU()


def refused(text, match):
    with pytest.raises(InvalidArgumentError, match=match):
        choose_device(text, WITHOUT_PARAMETERS)


# --- drivers that spill to the host ---


@pytest.mark.parametrize(
    ("system", "release", "where"),
    [
        ("win32", "10", "Windows"),
        ("linux", "5.15.167.4-microsoft-standard-WSL2", "WSL"),
        ("linux", "4.4.0-19041-Microsoft", "WSL"),
        ("linux", "6.8.0-45-generic", None),
        ("darwin", "23.6.0", None),
    ],
)
def test_drivers_spill_on_windows_and_wsl(monkeypatch, system, release, where):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.release", lambda: release)
    why = sharing.why_spills()
    assert why is None if where is None else f"on {where} the driver lends system memory, many times slower" in why


def test_a_card_that_spills_is_capped_at_its_own_memory(monkeypatch):
    monkeypatch.setattr(sharing, "why_spills", lambda: "memory spills here")
    device = FakeAccelerator(FakeModule(total_bytes=2048 * MIB, spilled_bytes=10 * GIB))
    assert (device.notes, device.available_bytes()) == (("memory spills here",), 1536 * MIB)
    device.fake.outside_bytes = 200 * MIB
    for limit_bytes, held_bytes in ((None, 1336 * MIB), (1400 * MIB, 1336 * MIB), (700 * MIB, 700 * MIB)):
        with device.cap(limit_bytes):
            assert device.fake.get_per_process_memory_fraction() * 2048 * MIB == held_bytes
    held = device.fake.alloc(3000 * MIB)  # part of it has spilled
    assert device.available_bytes() == 2048 * MIB
    del held


# --- stated budgets ---


@pytest.mark.parametrize(
    ("text", "index", "size"),
    [
        ("{}:256MiB", 0, 256 * MIB),
        ("{}:1:256MiB", 1, 256 * MIB),
        ("{}:0:0.5 GiB", 0, GIB // 2),
        ("{}:1:100 mb", 1, 10**8),
        ("{}:1", 1, GIB),
    ],
)
@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_budget_is_read_after_the_device(cards, kind, text, index, size):
    cards.kind = kind
    device = choose_device(text.format(kind), WITHOUT_PARAMETERS)
    assert (device.torch_device, device.available_bytes()) == (torch.device(kind, index), size)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("cuda:1:1.01GiB", "of Fake Card requested, but only 1.00 GiB can be used: state less, such as '768MiB'"),
        ("cuda:8GiBs", "'8GiBs' is not a size in memory"),
        ("cuda:0GiB", "'0GiB' is not a size in memory"),
        ("cuda:8GiB:1", "not a device that torch knows"),
        ("cuda:1:8", "not a device that torch knows"),
        ("cuda:GiB", "not a device that torch knows"),
        (":8GiB", "not a device that torch knows"),
    ],
)
def test_an_invalid_budget_is_refused(cards, text, match):
    refused(text, match)


# --- memory shared with the host ---


@pytest.mark.parametrize("name", ["is_integrated", "is_integrated_gpu"])
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), None])
@pytest.mark.parametrize(("free", "typed"), [(GIB // 2, "384MiB"), (None, "384MiB"), (400 * GIB, "768MiB")])
def test_shared_memory_needs_a_budget(cards, name, device, free, typed):
    cards.properties[name] = 1
    cards.free = free
    typed = f"cuda:{1 if device == 'cuda:1' else 0}:{typed}"
    refused(device, rf"the whole machine swaps or freezes \(pytorch#174358\)\. State one: device='{typed}'")
    assert choose_device(typed, WITHOUT_PARAMETERS).integrated
    line = f"{typed[:6]}  Fake Card  1.00 GiB  shares the host's memory: state a budget, such as '{typed}'"
    assert line in map(describe_device, list_devices())


def test_a_fraction_set_by_the_user_is_a_budget(cards):
    cards.properties["is_integrated"] = True
    cards.fraction = 0.25
    assert choose_device("cuda", WITHOUT_PARAMETERS).available_bytes() == 256 * MIB
    cards.free = 100 * MIB
    assert choose_device("cuda", WITHOUT_PARAMETERS).available_bytes() == 100 * MIB


@pytest.mark.parametrize(("is_integrated", "expected"), [(1, [150, 512]), (0, [512, 512])])
def test_shared_memory_is_bounded_by_free_host_memory(monkeypatch, is_integrated, expected):
    device = FakeAccelerator(FakeModule(is_integrated=is_integrated), 512 * MIB)
    own, found = device.fake.alloc(50 * MIB), []  # the host counts this as used
    for free_bytes in (100 * MIB, None):  # None: unknown
        monkeypatch.setattr(linux, "free_bytes", lambda free_bytes=free_bytes: free_bytes)
        found.append(device.available_bytes() // MIB)
    assert found == expected
    assert ["shares the host's memory" in note for note in device.notes] == [True] * is_integrated
    del own


# --- Apple ---


@pytest.fixture
def metal(monkeypatch):
    """Imitate `torch.mps` on a Mac with 16 GiB, and return the list of fractions that are set."""
    fractions = []
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 16 * GIB)
    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", fractions.append)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: None)
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: None)
    monkeypatch.delenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", raising=False)
    return fractions


def test_a_mac_is_limited_to_metals_recommendation(metal):
    device = MpsDevice()
    assert (device.available_bytes(), device.total_bytes) == (16 * GIB, 16 * GIB)
    assert "the working set that Metal recommends, 16.00 GiB" in device.notes[0]
    for limit_bytes, fraction in ((None, 1), (0, 0), (4 * GIB, 0.25), (20 * GIB, 1)):
        with device.cap(limit_bytes):
            assert metal[-1] == fraction
        assert metal[-1] == 1.7


def test_a_budget_for_a_mac_is_refused(cards, metal):
    cards.kind = "mps"
    assert isinstance(choose_device("mps", WITHOUT_PARAMETERS), MpsDevice)
    refused("mps:0:8GiB", "mps takes no budget: lower memory_fraction")


def test_torch_mps_has_the_functions_used():
    used = set(re.findall(r"torch\.mps\.(\w+)", ast.unparse(ast.parse(Path(mps.__file__).read_text()))))
    assert len(used) > 4
    assert all(hasattr(torch.mps, name) for name in used)
