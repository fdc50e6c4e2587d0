"""Processes that answer, die, hang, babble and leave others behind, as their parent sees them."""

import atexit
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults.processes import is_gone, open_files

from isolation.stage import Stage
from oomprobe.isolation import process
from oomprobe.isolation.exit_status import ExitStatus
from oomprobe.isolation.messages import receive, send
from oomprobe.isolation.process import TAIL_BYTES, Process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are isolated on Linux only")
AT_ONCE_S = 5  # long before anything here would end by itself, and the time of a busy machine
LONG_S = 20


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    stage = Stage(__name__, tmp_path_factory.mktemp("stage") / "stderr")
    yield stage
    stage.close()


# --- what children do ---


def answers(wire):
    while (message := receive(wire)) is not None:
        send(wire, {"heard": message})


def is_killed(wire):
    os.kill(os.getpid(), signal.SIGKILL)


def aborts(wire):
    os.write(2, b"a library: no licence\n")
    os.abort()


def leaves(wire):
    os._exit(3)


def raises(wire):
    raise KeyError("labels")


def answers_and_dies(wire):
    send(wire, {"heard": receive(wire), "more": "x" * 100_000})  # is not read at once, and waits in the socket
    os._exit(3)


def sleeps(wire):
    time.sleep(LONG_S)


def refuses_to_end(wire):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleeps(wire)


def computes(wire):
    until = time.process_time() + 1.2
    while time.process_time() < until:
        pass
    send(wire, {"heard": "nothing"})


def waits_for_a_worker(wire):
    if not (worker := os.fork()):
        computes(wire)
        os._exit(0)
    os.waitpid(worker, 0)
    time.sleep(LONG_S)


def hangs_up(wire):
    wire.close()
    time.sleep(LONG_S)


def chatters(wire):
    os.write(2, b"first words\n" + b"a line of a log\n" * (2 * TAIL_BYTES // 16) + b"last words\n")
    time.sleep(LONG_S)


def sleeper(**options):
    process = subprocess.Popen(["sleep", str(LONG_S)], **options)
    process.returncode = 0  # no warning about it
    return process.pid


def has_offspring(wire):
    """One of its own, one in a group of its own, and one whose parent has ended."""
    orphan = subprocess.run(
        ["sh", "-c", f"sleep {LONG_S} >&- & echo $!"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    send(wire, {"heard": [sleeper(), sleeper(process_group=0), int(orphan)]})
    receive(wire)
    os._exit(3)


def leaves_its_pipes_to_another(wire):
    sleeper(pass_fds=[wire.fileno()], start_new_session=True)
    os._exit(3)


def looks_around(wire):
    ignored = [name for name in ("SIGINT", "SIGTERM") if signal.getsignal(getattr(signal, name)) == signal.SIG_IGN]
    killed_first = Path("/proc/self/oom_score_adj").read_text()
    send(wire, {"heard": [os.getsid(0) == os.getpid(), ignored, killed_first]})


# --- what is played ---


def all_gone(pids):
    until = time.monotonic() + AT_ONCE_S
    while not all(map(is_gone, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    return all(map(is_gone, pids))


def shown(answer):
    return {"death": dataclasses.asdict(answer)} if isinstance(answer, ExitStatus) else answer


def listened(act, *, within_s=None, stuck_s=None, after_s=0.0, **constants):
    """What comes from a process, and how long that took."""
    for name, value in constants.items():
        setattr(process, name, value)
    child, began_s = Process.forked(globals()[act]), time.monotonic()
    child.tell({"do": "something"})
    time.sleep(after_s)
    answer = shown(child.listen(deadline_s=None if within_s is None else began_s + within_s, stuck_s=stuck_s))
    return {**answer, "took_s": time.monotonic() - began_s, "gone": is_gone(child.pid)}


def asked_twice():
    before, child = open_files(), Process.forked(answers)
    heard = []
    for number in range(2):
        child.tell({"number": number})
        heard.append(child.listen(deadline_s=None))
    return [*heard, shown(child.end()), open_files() == before]


def left_behind(end):
    """Who of a process's own is left, after one way to end it, and of those that were there before it."""
    before, child = sleeper(), Process.forked(has_offspring)
    pids = child.listen(deadline_s=None)["heard"]
    were_there = not any(map(is_gone, [child.pid, *pids]))
    if end == "death":
        child.tell({"do": "die"})
        child.listen(deadline_s=None)
    else:
        child.end("timed out")
    spared = not is_gone(before)
    os.kill(before, signal.SIGKILL)
    return [were_there, all_gone([child.pid, *pids]), spared]


def ends_without_cleaning_up(act, file):
    with open(file, "w") as log, contextlib.redirect_stdout(log):
        atexit.register(log.write, "at exit ")
        sys.stdout.write("said before ")  # and kept in a buffer
        try:
            return listened(act)["death"]["code"]
        finally:
            log.write("finally ")


# --- what is promised ---


def death(stage, act, **given):
    shown = stage.play(listened, act=act.__name__, **given)
    assert shown["gone"]
    assert shown["took_s"] < AT_ONCE_S
    return shown["death"]


def test_it_answers_twice_and_leaves_no_file_open(stage):
    one, other, end, closed = stage.play(asked_twice)
    assert [one, other] == [{"heard": {"number": 0}}, {"heard": {"number": 1}}]
    assert end["death"]["why"] is None
    assert closed


def test_it_leads_a_session_ignores_ctrl_c_and_is_killed_first(stage):
    assert stage.play(listened, act="looks_around")["heard"] == [True, ["SIGINT"], "1000\n"]


@pytest.mark.parametrize(
    ("act", "number", "code", "words"),
    [
        (is_killed, signal.SIGKILL, None, ""),
        (aborts, signal.SIGABRT, None, "a library: no licence"),
        (leaves, None, 3, ""),
        (raises, None, 70, "KeyError: 'labels'"),
    ],
)
def test_a_death_tells_how_it_came(stage, act, number, code, words):
    seen = death(stage, act)
    assert (seen["signal"], seen["code"], seen["why"], seen["oom_kills"]) == (number, code, None, 0)
    assert words in seen["stderr"]
    assert 2**20 < seen["peak_resident_bytes"] < 2**33


def test_an_answer_that_came_whole_before_a_death_is_an_answer(stage):
    assert stage.play(listened, act="answers_and_dies", after_s=0.3)["heard"] == {"do": "something"}


def test_a_hang_says_where_to_the_probe_alone_and_is_ended_in_time(stage):
    before = len(stage.said)
    seen = death(stage, sleeps, within_s=0.3)
    assert (seen["why"], seen["signal"]) == ("timed out", signal.SIGTERM)
    assert "most recent call first" in seen["stderr"]
    assert "in sleeps" in seen["stderr"]
    assert "most recent call first" not in stage.said[before:]


@pytest.mark.parametrize(
    ("act", "options", "why", "number"),
    [
        (refuses_to_end, {"within_s": 0.3, "GRACE_S": 0.3}, "timed out", signal.SIGKILL),
        (sleeps, {"stuck_s": 0.4, "LOOK_S": 0.1}, "stuck", signal.SIGTERM),
        (hangs_up, {"GRACE_S": 0.3}, None, signal.SIGKILL),
    ],
)
def test_what_does_not_end_is_ended(stage, act, options, why, number):
    seen = death(stage, act, **options)
    assert (seen["why"], seen["signal"]) == (why, number)


@pytest.mark.parametrize("act", ["computes", "waits_for_a_worker"])
def test_a_busy_process_is_not_stuck(stage, act):
    shown = stage.play(listened, act=act, stuck_s=0.7, LOOK_S=0.1)
    assert shown["heard"] == "nothing"


def test_the_end_of_its_stderr_is_kept_and_all_of_it_passed_on(stage):
    seen = death(stage, chatters, within_s=0.5)
    words = seen["stderr"]
    assert TAIL_BYTES - 1000 < len(words) <= TAIL_BYTES
    assert "last words" in words
    assert "first words" not in words
    assert "first words\na line of a log\n" in stage.said


@pytest.mark.parametrize("end", ["death", "timed out"])
def test_nobody_it_started_outlives_it_and_nobody_else_ends(stage, end):
    assert stage.play(left_behind, end=end) == [True, True, True]


def test_who_holds_its_pipes_open_does_not_hide_its_death(stage):
    assert death(stage, leaves_its_pipes_to_another)["code"] == 3


@pytest.mark.parametrize(("act", "code"), [("leaves", 3), ("raises", 70)])
def test_nothing_of_the_parents_is_run_or_written_twice(stage, tmp_path, act, code):
    assert stage.play(ends_without_cleaning_up, act=act, file=str(tmp_path / "log")) == code
    assert (tmp_path / "log").read_text() == "said before finally "
