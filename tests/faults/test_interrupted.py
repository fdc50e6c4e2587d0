"""Ctrl-C, SIGTERM and a closed terminal while a command runs: its output, and that no process is left."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import termios

import pytest
from processes import PATIENCE_S, environment, marked, until

TARGET = """
import sys
import time

import torch


def build():
    model = torch.nn.Linear(8, 8)

    def step(model, batch_size):
        model(torch.randn(batch_size, 8)).sum().backward()
        if batch_size == 4:
            sys.stderr.write("asleep\\n")
            sys.stderr.flush()
            time.sleep(600)

    return model, step
"""


class Terminal:
    """A command on a pseudo-terminal; `type` reaches it as a keyboard would."""

    def __init__(self, command, env, cwd):
        self._ours, theirs = os.openpty()

        def take_terminal():
            os.setsid()
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            cwd=cwd,
            preexec_fn=take_terminal,
        )
        os.close(theirs)
        os.set_blocking(self._ours, False)
        self.shown = ""

    def shows(self, text):
        with contextlib.suppress(BlockingIOError, OSError):
            self.shown += os.read(self._ours, 2**16).decode(errors="replace").replace("\r\n", "\n")
        return text in self.shown

    def type(self, keys):
        os.write(self._ours, keys)

    def exit_code(self):
        until(lambda: (self.shows(""), self.process.poll())[1] is not None)
        return self.process.returncode

    def hang_up(self):
        os.close(self._ours)
        self._ours = None

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._ours is not None:
            self.hang_up()


@pytest.fixture
def command(tmp_path, mark):
    """Start a probe that sleeps in batch 4, with or without a terminal."""
    (tmp_path / "slow_target.py").write_text(TARGET)
    line = [
        sys.executable,
        "-m",
        "oomprobe",
        "run",
        f"{tmp_path}/slow_target.py:build",
        "--device",
        "cpu:1GiB",
    ]
    line += ["--progress", "off"]
    env = environment(TMPDIR=str(tmp_path / "temporary"), NO_COLOR="1")
    started = []

    def start(*, terminal):
        if terminal:
            started.append(Terminal(line, env, tmp_path))
        else:
            started.append(
                subprocess.Popen(line, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
            )
        return started[-1]

    yield start
    for one in started:
        if isinstance(one, Terminal):
            one.close()
        else:
            one.kill()
            one.communicate()
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)


def asleep(process):
    """Wait until the step sleeps."""
    lines = []
    while not lines or lines[-1] != b"asleep\n":
        lines.append(process.stderr.readline())
        assert lines[-1], lines


# The command, the process that forks workers, one of these, its child for a trial, and the keepers of the two before.
PROCESSES = 6


def test_ctrl_c_at_a_terminal(command, mark):
    terminal = command(terminal=True)
    until(lambda: terminal.shows("asleep"))
    assert len(marked(mark)) == PROCESSES
    terminal.type(b"\x03")
    assert terminal.exit_code() == 130
    assert "interrupted" in terminal.shown
    assert "trials so far" in terminal.shown
    table = terminal.shown.partition("trials so far")[2].splitlines()
    assert [line.split()[:3] for line in table if " grow " in line] == [
        ["1", "grow", "fits"],
        ["2", "grow", "fits"],
    ]
    assert "Traceback" not in terminal.shown
    until(lambda: not marked(mark), within_s=5)


def test_a_closed_terminal(command, mark):
    terminal = command(terminal=True)
    until(lambda: terminal.shows("asleep"))
    terminal.hang_up()
    assert terminal.process.wait(PATIENCE_S) == 143
    until(lambda: not marked(mark), within_s=5)


def test_sigterm(command, mark):
    process = command(terminal=False)
    asleep(process)
    process.terminate()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (143, b"")
    assert b"terminated" in err
    assert b"trials so far" in err
    assert b"left the process" not in err
    until(lambda: not marked(mark), within_s=5)
