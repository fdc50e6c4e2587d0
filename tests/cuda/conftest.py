"""Tests on torch's CUDA build and the bed (tests/bed); `scripts/test tests/cuda` runs them."""

import pytest
import torch

from oomprobe.devices import choose

collect_ignore = ["script.py"]  # it trains when it is imported, as doctests would do


@pytest.fixture(autouse=True)
def with_a_driver(monkeypatch):
    """The bed has a driver's libraries, and none of the files that a driver makes."""
    monkeypatch.setattr(choose, "DRIVERS", ["/"])


@pytest.fixture(autouse=True)
def no_cuda_in_this_process():
    yield
    assert not torch.cuda.is_initialized(), (
        "use `forked`: after using CUDA, this process cannot fork for other tests"
    )
