"""What differs between versions of torch; tests/cuda compares each version with its own allocator."""

import pytest
import torch

import oomprobe
from oomprobe.ground import torch_versions
from oomprobe.ground.torch_versions import BlockOrder
from oomprobe.simulation.allocator import CachingAllocator
from oomprobe.simulation.settings import AllocatorSettings

MIB = 2**20
CUBLAS, LT = 8_519_680, MIB


def version(monkeypatch, text):
    monkeypatch.setattr(torch_versions, "VERSION", tuple(int(part) for part in text.split(".")))


# (torch, TORCH_CUBLAS_WORKSPACE_CACHE) -> bytes that a product and a product with a bias leave allocated, and borrow
WORKSPACES = {
    ("2.6", None): (CUBLAS, CUBLAS, LT),
    ("2.8", None): (CUBLAS, CUBLAS, LT),
    ("2.9", None): (CUBLAS, CUBLAS + LT, 0),
    ("2.11", None): (CUBLAS, CUBLAS + LT, 0),
    ("2.12", None): (CUBLAS, CUBLAS, 0),
    ("2.14", None): (CUBLAS, CUBLAS, 0),
    ("2.15", None): (0, 0, LT),
    ("2.16", None): (0, 0, LT),
    ("2.15", "0"): (0, 0, LT),
    ("2.15", "1"): (CUBLAS, CUBLAS, 0),
}


@pytest.mark.parametrize(("torch_version", "cache"), WORKSPACES)
def test_workspaces(monkeypatch, torch_version, cache):
    version(monkeypatch, torch_version)
    monkeypatch.delenv("TORCH_CUBLAS_WORKSPACE_CACHE", raising=False)
    if cache:
        monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", cache)
    card = oomprobe.SimulatedDevice("1GiB")

    def multiply(bias):
        """Return the bytes that a product leaves, and those that it takes beside its result."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        matrix, weight = torch.zeros(64, 64, device="cuda"), torch.zeros(64, device="cuda")
        started = torch.cuda.memory_allocated()
        product = matrix @ matrix if not bias else torch.addmm(weight, matrix, matrix)
        taken = torch.cuda.max_memory_allocated() - started - product.nbytes
        del matrix, weight, product
        return torch.cuda.memory_allocated() - before, taken

    with card.session():
        plain, lt = multiply(bias=False), multiply(bias=True)
    kept, kept_with_lt, borrowed = WORKSPACES[torch_version, cache]
    assert plain == (kept, CUBLAS)
    assert lt == (kept_with_lt - kept, kept_with_lt - kept + borrowed)


@pytest.mark.parametrize(
    ("torch_version", "capability", "large"),
    [
        ("2.11", (9, 0), True), ("2.11", (10, 0), False), ("2.13", (12, 0), True), ("2.13", (11, 0), False),
        ("2.14", (11, 0), True), ("2.15", (8, 9), False),
    ],
)  # fmt: skip
def test_size_of_the_workspace(monkeypatch, torch_version, capability, large):
    version(monkeypatch, torch_version)
    assert torch_versions.has_large_workspace(capability) is large


@pytest.mark.parametrize(
    ("torch_version", "width", "padded"),
    [
        ("2.6", 200, 224),
        ("2.7", 160, 160),
        ("2.10", 200, 256),
        ("2.10", 160, 160),
        ("2.11", 160, 192),
        ("2.11", 100, 128),
    ],
)
def test_padding_of_flash_attention(monkeypatch, torch_version, width, padded):
    version(monkeypatch, torch_version)
    assert torch_versions.flash_backward_width(width) == padded


@pytest.mark.parametrize(
    ("torch_version", "bias", "dtype", "beta", "rows", "is_lt"),
    [
        ("2.8", (96,), torch.float32, 1, 48, True),
        ("2.8", (96,), torch.float32, 2, 48, False),
        ("2.8", (96,), torch.complex64, 1, 48, False),
        ("2.10", (96,), torch.float32, 1, 1, False),
        ("2.11", (96,), torch.float32, 1, 1, True),
        ("2.8", (1, 96), torch.float32, 1, 48, False),
        ("2.10", (1, 96), torch.float32, 1, 48, True),
        ("2.14", (48, 96), torch.bfloat16, 1, 48, False),
        ("2.15", (48, 96), torch.bfloat16, 1, 48, True),
        ("2.15", (48, 96), torch.float32, 1, 48, False),
    ],
)
def test_which_products_use_cublaslt(monkeypatch, torch_version, bias, dtype, beta, rows, is_lt):
    version(monkeypatch, torch_version)
    tensors = (torch.zeros(*shape, dtype=dtype) for shape in (bias, (rows, 80), (80, 96)))
    assert torch_versions.uses_lt(*tensors, beta) is is_lt


@pytest.mark.parametrize(
    ("order", "chosen"),
    [(BlockOrder.ADDRESS, [2, 1, 0]), (BlockOrder.BLOCK, [0, 1, 2]), (BlockOrder.SEGMENT, [0, 1, 2])],
)
def test_which_of_equal_blocks_is_used(order, chosen):
    allocator = CachingAllocator(1024 * MIB, AllocatorSettings(block_order=order))
    handles = [allocator.malloc(30 * MIB) for _ in range(3)]
    places = [allocator._live[handle].address for handle in handles]
    for handle in handles:
        allocator.free(handle)
    used = [allocator._live[allocator.malloc(30 * MIB)].address for _ in range(3)]
    assert [places.index(place) for place in used] == chosen


@pytest.mark.parametrize(("order", "chosen"), [(BlockOrder.ADDRESS, 0), (BlockOrder.BLOCK, 2), (BlockOrder.SEGMENT, 0)])
def test_splitting_makes_a_new_block_in_torch_2_12(order, chosen):
    allocator = CachingAllocator(1024 * MIB, AllocatorSettings(block_order=order))
    whole, _ = allocator.malloc(3 * 512), allocator.malloc(512)
    allocator.free(whole)
    parts = [allocator.malloc(512) for _ in range(3)]  # the last is what is left of the whole
    places = [allocator._live[handle].address for handle in parts]
    allocator.free(parts[0])
    allocator.free(parts[2])
    assert places.index(allocator._live[allocator.malloc(512)].address) == chosen


def test_a_torch_newer_than_those_tested_is_noted(monkeypatch):
    def notes():
        model = torch.nn.Linear(8, 8)
        step = lambda model, n: model(torch.zeros(n, 8)).sum().backward()  # noqa: E731
        return oomprobe.check(model, step, 2, device="sim:1GiB", progress="off").notes

    assert not any("newest that this oomprobe was tested with" in note for note in notes())
    version(monkeypatch, "2.99")
    monkeypatch.setattr(torch_versions, "NEWEST_TESTED", (2, 15))
    assert sum(f"torch {torch.__version__} is newer than 2.15" in note for note in notes()) == 1
