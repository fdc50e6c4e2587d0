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


def test_children_and_the_processor_they_used():
    child = started()
    assert child.pid in system.children_of(os.getpid())
    assert child.pid not in system.children_of(1)
    assert system.cpu_s(child.pid) < 1
    assert system.cpu_s(os.getsid(0)) > system.cpu_s(child.pid)
    assert not system.has_ended(child.pid)
    child.kill()
    while not system.has_ended(child.pid):
        time.sleep(0.01)
    assert child.pid in system.children_of(os.getpid())  # a zombie, whose number nobody else can have
    status, peak_bytes = system.reap(child.pid, wait=True)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert 10_000 < peak_bytes < 2**30
    assert child.pid not in system.children_of(os.getpid())
    assert system.reap(child.pid, wait=True) is None
    assert system.cpu_s(2**22 + 1) == 0
    child.returncode = 0


def test_a_group_ends_with_those_in_it():
    leader = started("sh", "-c", "sleep 60 & echo; wait")
    time.sleep(0.2)
    [inner] = system.children_of(leader.pid)
    system.end_group(leader.pid)
    leader.wait()
    assert gone(inner)
    system.end_group(leader.pid)  # nobody is there any more


def test_descendants_are_found_whatever_session_they_are_in():
    leader = started("sh", "-c", 'setsid sh -c "setsid sleep 60 & wait" & wait')
    time.sleep(0.3)
    found = system.descendants_of(leader.pid)
    assert len(found) == 2
    assert len({os.getsid(pid) for pid in found}) == 2
    assert found < system.descendants_of(os.getpid())
    for pid in {leader.pid, *found}:
        os.kill(pid, signal.SIGKILL)
    leader.wait()
    assert system.descendants_of(leader.pid) == set()


def test_all_children_end_but_those_spared():
    spared, other = started(), started()
    system.end_children({spared.pid, *system.children_of(os.getpid())} - {other.pid})
    assert gone(other.pid)
    assert not is_gone(spared.pid)
    spared.kill()
    spared.wait()
    other.returncode = 0


def test_orphans_come_to_whoever_adopts_them():
    code = """
import os, subprocess, time
from oomprobe.isolation import system
system.adopt_orphans()
spared = system.children_of(os.getpid())
subprocess.run(["sh", "-c", "setsid sleep 61 & setsid sh -c 'trap \\"\\" TERM; sleep 62' & sleep 0.3"])
assert len(system.children_of(os.getpid())) == 2, system.children_of(os.getpid())
system.end_children(spared)
print(len(system.children_of(os.getpid())))
"""
    process = python(code)
    assert process.communicate()[0] == "0\n"


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
