"""Fixtures for the simulation's tests: byte counts that hold with every version of torch."""

import pytest

from oomprobe.ground.torch_versions import LtWorkspace, Workspaces
from oomprobe.simulation import memory


@pytest.fixture(autouse=True)
def one_workspace_is_kept(monkeypatch):
    """As in torch 2.12 to 2.14; tests/test_torch_versions.py tests what each version does."""
    monkeypatch.setattr(memory, "workspaces", lambda: Workspaces(kept=True, lt=LtWorkspace.SHARED))
