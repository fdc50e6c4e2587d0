"""A plugin of pytest for scripts/mutants: which functions of the package each test enters, and how long it takes."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

PACKAGE = str(Path(__file__).parents[1] / "oomprobe") + os.sep
SEEN = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    entered = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.add((frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_firstlineno))

    begun = time.perf_counter()
    sys.setprofile(note)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        SEEN[item.nodeid] = time.perf_counter() - begun, sorted(entered)


def pytest_sessionfinish():
    Path(os.environ["MUTANTS"], f"{os.getpid()}.json").write_text(json.dumps(SEEN))
