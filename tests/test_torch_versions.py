"""What differs between versions of torch; tests/cuda compares each version with its own allocator."""

import pytest
import torch

import oomprobe
from oomprobe.ground import torch_versions

MIB = 2**20
CUBLAS, LT = 8_519_680, MIB


def version(monkeypatch, text):
    monkeypatch.setattr(torch_versions, "VERSION", tuple(int(part) for part in text.split(".")))


# (torch, TORCH_CUBLAS_WORKSPACE_CACHE) -> bytes that a product and a product with a bias leave allocated, and borrow
WORKSPACES = {
    ("2.8", None): (CUBLAS, CUBLAS, LT),
    ("2.9", None): (CUBLAS, CUBLAS + LT, 0),
    ("2.11", None): (CUBLAS, CUBLAS + LT, 0),
    ("2.12", None): (CUBLAS, CUBLAS, 0),
    ("2.14", None): (CUBLAS, CUBLAS, 0),
    ("2.15", None): (0, 0, LT),
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


def product_uses_lt(bias, dtype, beta, rows):
    tensors = (torch.zeros(*shape, dtype=dtype) for shape in (bias, (rows, 80), (80, 96)))
    return torch_versions.uses_lt(*tensors, beta)


LARGE, PADDED = torch_versions.has_large_workspace, torch_versions.flash_backward_width


@pytest.mark.parametrize(
    ("torch_version", "function", "arguments", "value"),
    [
        ("2.11", LARGE, [(9, 0)], True),
        ("2.11", LARGE, [(10, 0)], False),
        ("2.13", LARGE, [(12, 0)], True),
        ("2.13", LARGE, [(11, 0)], False),
        ("2.14", LARGE, [(11, 0)], True),
        ("2.15", LARGE, [(8, 9)], False),
        ("2.6", PADDED, [200], 224),
        ("2.10", PADDED, [200], 256),
        ("2.10", PADDED, [160], 160),
        ("2.11", PADDED, [160], 192),
        ("2.8", product_uses_lt, [(96,), torch.float32, 1, 48], True),
        ("2.8", product_uses_lt, [(96,), torch.float32, 2, 48], False),
        ("2.8", product_uses_lt, [(96,), torch.complex64, 1, 48], False),
        ("2.10", product_uses_lt, [(96,), torch.float32, 1, 1], False),
        ("2.11", product_uses_lt, [(96,), torch.float32, 1, 1], True),
        ("2.8", product_uses_lt, [(1, 96), torch.float32, 1, 48], False),
        ("2.10", product_uses_lt, [(1, 96), torch.float32, 1, 48], True),
        ("2.14", product_uses_lt, [(48, 96), torch.bfloat16, 1, 48], False),
        ("2.15", product_uses_lt, [(48, 96), torch.bfloat16, 1, 48], True),
        ("2.15", product_uses_lt, [(48, 96), torch.float32, 1, 48], False),
    ],
)
def test_what_a_version_does(monkeypatch, torch_version, function, arguments, value):
    """The size of cuBLAS's workspace, the width to which flash attention pads, and which products use cuBLASLt."""
    version(monkeypatch, torch_version)
    assert function(*arguments) == value


def test_a_torch_newer_than_those_tested_is_noted(monkeypatch):
    def notes():
        model = torch.nn.Linear(8, 8)
        step = lambda model, n: model(torch.zeros(n, 8)).sum().backward()  # noqa: E731
        return oomprobe.check(model, step, 2, device="sim:1GiB", progress="off").notes

    assert not any("newest that this oomprobe was tested with" in note for note in notes())
    version(monkeypatch, "2.99")
    monkeypatch.setattr(torch_versions, "NEWEST_TESTED", (2, 15))
    assert sum(f"torch {torch.__version__} is newer than 2.15" in note for note in notes()) == 1
