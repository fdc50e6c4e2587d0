"""Probes that are killed while their target or command has processes which are hard to find: nothing of them is left."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from processes import PATIENCE_S, environment, marked, running, until

SECONDS = str(600 + os.getpid() / 1e7)  # that the processes sleep: known by their command line
TARGET = f"""
import subprocess, time
import torch

def build():
    for options in ({{}}, {{"start_new_session": True}}, {{"start_new_session": True, "env": {{}}}}):
        subprocess.Popen(["sleep", "{SECONDS}"], **options)
    subprocess.run(["sh", "-c", "env -i setsid sleep {SECONDS} &"])

    def step(model, batch_size):
        time.sleep(0.02)
        model(torch.randn(batch_size, 8)).sum().backward()

    return torch.nn.Linear(8, 8), step
"""
STARTED_BY = {"target": 4, "command": 3}  # processes that sleep
COMMAND = f"touch $1/kept; env -i setsid sleep {SECONDS} & sleep {SECONDS} & sleep {SECONDS}"


@pytest.fixture
def probing(tmp_path, mark):
    """Return a function that starts a probe of a target or a command, as a user does."""
    started = []

    def start(kind):
        (tmp_path / "train.py").write_text(TARGET)
        given = {
            "target": ["--device", "cpu:1GiB", f"{tmp_path}/train.py:build"],
            "command": ["--memory-fraction", "1", "--", "sh", "-c", COMMAND, "{batch}", "{dir}"],
        }
        words = [sys.executable, "-m", "oomprobe", "run", "--progress", "off", *given[kind]]
        started.append(
            subprocess.Popen(
                words, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE
            )
        )
        return started[-1]

    yield start
    for pid in [*(process.pid for process in started), *running(SECONDS)]:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for process in started:
        process.communicate()


def is_nothing_left(mark):
    return not running(SECONDS) and not marked(mark) and not os.listdir(tempfile.gettempdir())


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("target", signal.SIGKILL),
        ("command", signal.SIGKILL),
        ("command", signal.SIGHUP),
    ],
)
def test_nothing_is_left_of_a_killed_probe(probing, mark, kind, sent):
    process = probing(kind)
    until(lambda: len(running(SECONDS)) >= STARTED_BY[kind])
    process.send_signal(sent)
    assert process.wait(PATIENCE_S) == (-9 if sent == signal.SIGKILL else 143)
    until(lambda: is_nothing_left(mark), within_s=20)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STARTED_BY)
def test_nothing_is_left_whenever_a_probe_is_killed(probing, mark, kind):
    """At 50 moments of its start, its trials and its end."""
    chosen = random.Random(7)
    for _ in range(25):
        process = probing(kind)
        time.sleep(chosen.uniform(0, 12 if kind == "target" else 6))
        sent = chosen.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
        process.send_signal(sent)
        process.wait(PATIENCE_S)
        until(lambda: is_nothing_left(mark), within_s=20)
