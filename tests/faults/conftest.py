"""Check after every test that its probes left no process, open file, temporary file or changed setting."""

import gc
import os
import random
import sys
import tempfile

import pytest
import torch
from processes import MARK, children, marked, open_files
from workers.forks import fork

from oomprobe.runners.workers.process import Process
from oomprobe.runners.workers.template import Template


def settings():
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled),
        "saved tensors hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "sys.path": list(sys.path),
        "tracing": (sys.gettrace(), sys.getprofile(), sys.excepthook),
        "collecting": gc.isenabled(),
    }


def leftovers(mark):
    files = [
        name for name in os.listdir(tempfile.gettempdir()) if not name.startswith("torchinductor_")
    ]  # torch's own
    return {"processes": marked(mark), "children": children(), "temporary files": files}


@pytest.fixture
def mark(tmp_path):
    """Identify the processes of one test."""
    return f"{tmp_path.name}-{random.SystemRandom().getrandbits(64):x}"


@pytest.fixture(autouse=True)
def nothing_left(mark, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv(MARK, mark)
    before, files, children_before = settings(), open_files(), children()
    yield
    assert settings() == before
    assert open_files() == files
    assert leftovers(mark) == {"processes": {}, "children": children_before, "temporary files": []}


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch):
    monkeypatch.setattr(Process, "spawned", fork)
    monkeypatch.setattr(Template, "of", lambda target: None)
