"""Accelerator behaviour that the CUDA bed cannot show: XPU functions, rounding of other torch versions, error classes."""

import ast
import inspect
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from fake_accelerator import ILLEGAL_ADDRESS, MIB, FakeAccelerator, FakeModule

import oomprobe
from oomprobe.devices import accelerator, statistics
from oomprobe.devices.accelerator import kernel_answers


def functions_used():
    trees = [ast.parse(Path(module.__file__).read_text()) for module in (accelerator, statistics)]
    return {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "_torch"
    }


@pytest.mark.parametrize("module", [torch.cuda, torch.xpu], ids=["cuda", "xpu"])
@pytest.mark.parametrize("name", sorted(functions_used()))
def test_torch_has_the_function_with_the_same_arguments(module, name):
    of_torch = inspect.signature(getattr(module, name)).parameters
    of_fake = inspect.signature(getattr(FakeModule(), name)).parameters
    assert [(p.name, p.default) for p in of_fake.values()] == [(p.name, p.default) for p in of_torch.values()]


def test_an_allocator_without_counters_is_not_under_pressure(monkeypatch):
    device = FakeAccelerator(FakeModule())  # torch.xpu.memory_stats counts bytes only
    monkeypatch.setattr(device.fake, "_counters", {})
    device.start_trial()
    assert (device.usage().alloc_retries, device.usage().under_pressure) == (0, False)


def test_a_torch_that_cannot_cap_is_refused(monkeypatch):
    device = FakeAccelerator(FakeModule())
    monkeypatch.delattr(FakeModule, "set_per_process_memory_fraction")  # as torch.xpu before 2.10
    with pytest.raises(oomprobe.UnreliableError, match=r"Fake Card: torch .* cannot limit .*Use torch 2\.10 or later"):
        device.available_bytes()


def test_a_cap_costs_no_byte():
    """Some torch versions round the fraction down; the one on the bed rounds to the nearest byte."""
    device = FakeAccelerator(FakeModule(total_bytes=150_109_880_320))
    device.fake.set_per_process_memory_fraction(0.9)
    before_bytes = device.fake._allowed_bytes
    for limit_bytes in range(31_160_284_221, 31_160_284_921, 7):  # some lose a byte in the division
        with device.cap(limit_bytes):
            assert device.fake._allowed_bytes == limit_bytes
        assert device.fake._allowed_bytes == before_bytes


@pytest.mark.parametrize(("error", "raised"), [(ValueError("its own"), ValueError), (None, torch.AcceleratorError)])
def test_a_cap_that_cannot_be_lifted_hides_no_error(error, raised):
    device = FakeAccelerator(FakeModule())

    def poisoned_step():
        with device.cap(10 * MIB):
            device.fake.poison()
            if error:
                raise error

    with pytest.raises(raised):
        poisoned_step()


@pytest.mark.parametrize(
    ("error", "healthy"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), True),
        # raised if memory runs out while the kernel is loaded
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB)"), True),
        (torch.AcceleratorError(ILLEGAL_ADDRESS), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"), False),
        (None, False),
    ],
)
def test_only_out_of_memory_counts_as_healthy(monkeypatch, error, healthy):
    monkeypatch.setattr(accelerator.torch, "ones", Mock(side_effect=error, return_value=torch.zeros(1)))
    assert kernel_answers(torch.device("cpu"), lambda: None) is healthy  # without an error, the result is wrong
