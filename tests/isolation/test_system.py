import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oomprobe.isolation import system

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are isolated on Linux only")


def started(*command):
    return subprocess.Popen(command or ["sleep", "60"], start_new_session=True)


def python(code):
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def gone(pid):
    until = time.monotonic() + 5
    while not is_gone(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return is_gone(pid)


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_processor_that_a_session_used():
    child = started()
    assert system.cpu_s(child.pid) < 1
    assert system.cpu_s(os.getsid(0)) > system.cpu_s(child.pid)
    assert not system.has_ended(child.pid)
    child.kill()
    while not system.has_ended(child.pid):
        time.sleep(0.01)
    status, peak_bytes = system.reap(child.pid)  # until now a zombie, whose number nobody else can have
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert 10_000 < peak_bytes < 2**30
    assert system.reap(child.pid) is None
    assert system.cpu_s(2**22 + 1) == 0
    child.returncode = 0


def test_a_session_ends_with_those_in_it():
    leader = subprocess.Popen(
        ["bash", "-c", "set -m; sleep 60 & echo $!; wait"], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    inner = int(leader.stdout.readline())
    other = started()
    system.kill_session(leader.pid)
    leader.communicate()
    assert gone(inner)
    assert not is_gone(other.pid)
    other.kill()
    other.wait()


def test_what_carries_the_mark_ends_wherever_it_went():
    marked = {**os.environ, system.MARK: "this"}
    shell = subprocess.run(
        ["sh", "-c", "setsid sleep 61 >&- & echo $!; setsid sh -c 'trap \"\" TERM; sleep 62' >&- & echo $!"],
        env=marked, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    pids = [int(pid) for pid in shell.stdout.split()]
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, system.MARK: "other"})
    system.kill_marked("this")
    assert all(map(gone, pids))
    assert not is_gone(other.pid)
    other.kill()
    other.wait()


def test_a_child_dies_with_its_parent():
    code = """
import os, time
from oomprobe.isolation import system
reading, writing = os.pipe()
pid = os.fork()
if not pid:
    system.die_with_parent()
    os.write(writing, b"x")
    time.sleep(60)
os.read(reading, 1)
print(pid)
"""
    process = python(code)
    pid = int(process.communicate()[0])
    time.sleep(0.2)
    assert gone(pid)


def test_a_process_that_asks_for_it_is_the_first_to_be_killed():
    code = """
from oomprobe.isolation import system
system.prefer_to_be_killed()
print(open("/proc/self/oom_score_adj").read().strip())
"""
    assert python(code).communicate()[0] == "1000\n"
