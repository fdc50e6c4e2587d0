import os
import signal
import subprocess
import sys

import pytest
from faults.processes import is_gone, until

from oomprobe.isolation import system

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are isolated on Linux only")


def test_the_processor_that_a_session_used():
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    assert system.cpu_s(child.pid) < 1
    assert system.cpu_s(os.getsid(0)) > system.cpu_s(child.pid)
    assert not system.has_ended(child.pid)
    child.kill()
    until(lambda: system.has_ended(child.pid))
    status, peak_bytes = system.reap(child.pid)  # until now a zombie, whose number nobody else can have
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert 10_000 < peak_bytes < 2**30
    assert system.cpu_s(2**22 + 1) == 0
    child.returncode = 0


def test_a_session_ends_and_what_carries_the_mark_wherever_it_went():
    """One in a group of its own, one that leads a session, and one of those that ignores SIGTERM."""
    script = "set -m; sleep 60 & echo $!; set +m; setsid sleep 61 & echo $!; setsid sh -c 'trap \"\" TERM; sleep 62' & echo $!; wait"
    leader, other = (
        subprocess.Popen(
            ["bash", "-c", script],
            start_new_session=True,
            stdout=subprocess.PIPE,
            env={**os.environ, system.MARK: mark},
        )
        for mark in ("this", "other")
    )
    pids, others = ([int(one.stdout.readline()) for _ in range(3)] for one in (leader, other))
    system.kill_started(leader.pid, "this")
    assert all(map(is_gone, pids))
    assert not any(map(is_gone, others))
    system.kill_started(other.pid, "other")
    assert all(map(is_gone, others))
    leader.communicate()
    other.communicate()


def test_a_process_that_asks_for_it_is_the_first_to_be_killed():
    code = """
from oomprobe.isolation import system
system.prefer_to_be_killed()
print(open("/proc/self/oom_score_adj").read().strip())
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "1000\n"
