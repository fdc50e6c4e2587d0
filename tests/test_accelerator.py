"""What the CUDA bed cannot show: XPU's functions, Apple's GPU, drivers that spill to the host, and odd errors of a small kernel."""

import ast
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from oomprobe import InvalidArgumentError
from oomprobe.devices import accelerator, choose_device, mps, sharing, statistics
from oomprobe.devices.accelerator import kernel_answers
from oomprobe.devices.mps import MpsDevice
from oomprobe.devices.statistics import Statistics

GIB = 2**30


def used(module, of):
    """Return the names of the functions of torch's module that a module of the package uses."""
    return {
        *re.findall(
            rf"{re.escape(of)}\.(\w+)", ast.unparse(ast.parse(Path(module.__file__).read_text()))
        )
    }


def test_torch_has_the_functions_with_the_same_arguments_for_xpu():
    names = used(accelerator, "self._torch") | used(statistics, "self._torch")
    assert len(names) > 9
    for name in names:
        of_cuda, of_xpu = (
            inspect.signature(getattr(module, name)).parameters
            for module in (torch.cuda, torch.xpu)
        )
        assert [(p.name, p.default) for p in of_cuda.values()] == [
            (p.name, p.default) for p in of_xpu.values()
        ]


def test_an_allocator_without_counters_has_counted_nothing():
    only_bytes = SimpleNamespace(
        memory_stats_as_nested_dict=lambda index: {"allocated_bytes": {"all": {"peak": 7}}}
    )
    counted = Statistics(only_bytes, 0)  # torch.xpu
    assert (
        counted.total("num_alloc_retries"),
        counted.current("reserved_bytes"),
        counted.peaks(),
    ) == (0, 0, (7, 0))


@pytest.mark.parametrize(
    ("error", "healthy"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), True),
        # raised if memory runs out while the kernel is loaded
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (None, True),
    ],
)
def test_only_out_of_memory_counts_as_healthy(monkeypatch, error, healthy):
    assert kernel_answers(torch.device("cpu"), Mock(side_effect=error)) is healthy
    monkeypatch.setattr(torch, "ones", torch.zeros)
    assert not kernel_answers(torch.device("cpu"), lambda: None)  # the result is wrong


@pytest.mark.parametrize(
    ("system", "release", "where"),
    [
        ("win32", "10", "Windows"),
        ("linux", "5.15.167.4-microsoft-standard-WSL2", "WSL"),
        ("linux", "6.8.0-45-generic", None),
    ],
)
def test_drivers_spill_on_windows_and_wsl(monkeypatch, system, release, where):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.release", lambda: release)
    why = sharing.why_spills()
    assert (
        why is None
        if where is None
        else f"on {where} the driver lends system memory, many times slower" in why
    )


# --- Apple ---


def test_torch_mps_has_the_functions_used():
    names = used(mps, "torch.mps")
    assert len(names) > 4
    assert all(hasattr(torch.mps, name) for name in names)


def test_a_mac_is_limited_to_metals_recommendation(monkeypatch):
    fractions = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 16 * GIB)
    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", fractions.append)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: None)
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: None)
    monkeypatch.delenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", raising=False)
    device = choose_device("mps", torch.nn.ReLU())
    assert isinstance(device, MpsDevice)
    assert (device.available_bytes(), device.total_bytes) == (16 * GIB, 16 * GIB)
    assert "the working set that Metal recommends, 16.00 GiB" in device.notes[0]
    for limit_bytes, fraction in ((None, 1), (0, 0), (4 * GIB, 0.25), (20 * GIB, 1)):
        with device.cap(limit_bytes):
            assert fractions[-1] == fraction
        assert fractions[-1] == 1.7
    with pytest.raises(InvalidArgumentError, match="mps takes no budget: lower memory_fraction"):
        choose_device("mps:0:8GiB", torch.nn.ReLU())
