"""Fixtures for all tests. The library must leave no limit, hook, handler or flag behind."""

import gc
import os
import resource
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from processes import environment
from torch.optim import optimizer as torch_optimizer
from warm import ADDRESS, Warm

from oomprobe import probe as probe  # else each forked child imports it and the next, in 0.3 s
from oomprobe.devices import simulated as simulated
from oomprobe.ground import torch_versions
from oomprobe.runners.hooks import preload_dynamo

ON_BED = any(Path(torch.__file__).parents[1].glob("nvidia/*/lib/libcudastub.so"))
# On a newer torch each result would have one more note, which has a test of its own.
torch_versions.NEWEST_TESTED = max(torch_versions.NEWEST_TESTED, torch_versions.VERSION)
pytest.register_assert_rewrite("helpers")
collect_ignore = ["bed/build.py"] if ON_BED else ["bed", "cuda"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell script started the tests in the background: without a handler the tests of Ctrl-C would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # nohup did, and a probe that inherits that goes on, as it should.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


def _process_settings():
    return {
        "RLIMIT_AS": resource.getrlimit(resource.RLIMIT_AS),
        "RLIMIT_DATA": resource.getrlimit(resource.RLIMIT_DATA),
        "handlers": [signal.getsignal(number) for number in HANDLED],
        "timer": signal.getitimer(signal.ITIMER_REAL)[0],
        "optimizer hooks": (
            len(torch_optimizer._global_optimizer_pre_hooks),
            len(torch_optimizer._global_optimizer_post_hooks),
        ),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
    }


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = _process_settings()
    yield
    assert _process_settings() == before


@pytest.fixture(autouse=True)
def frozen_so_far():
    """Freeze objects like a probe, but for good: collecting everything that was imported takes 60 ms each time."""
    preload_dynamo()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def warm():
    with tempfile.TemporaryDirectory() as folder:
        yield Warm(Path(folder), environment())


@pytest.fixture
def warm_python(warm, monkeypatch):
    """Start Python warm, as `sys.executable` and as "python", without the seconds of importing torch (tests/warm.py)."""
    monkeypatch.setattr(sys, "executable", warm.python)
    monkeypatch.setenv("PATH", str(Path(warm.python).parent), prepend=os.pathsep)
    monkeypatch.setenv(ADDRESS, warm.address)


def pytest_terminal_summary(terminalreporter):
    """Print the time of each layer, a folder of tests, over all processes."""
    if not terminalreporter.config.option.durations:
        return
    layers = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                layers[str(Path(report.nodeid.partition("::")[0]).parent)] += report.duration
    terminalreporter.section("time of each layer")
    for layer, duration_s in layers.most_common():
        terminalreporter.line(f"{duration_s:7.1f} s  {layer}")
