"""Processes that answer, die, hang, write to stderr and leave descendants, seen from their parent."""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from processes import is_gone, open_files, start

from oomprobe.records.patience import PATIENCE, Patience
from oomprobe.records.trials import Call, CallRecord, Learning, Phase, Request
from oomprobe.rules.look import merged
from oomprobe.rules.program import further
from oomprobe.runners.workers.crew import Crew
from oomprobe.runners.workers.exit_status import ExitStatus
from oomprobe.runners.workers.messages import Lost, receive, send
from oomprobe.runners.workers.process import TAIL_BYTES, Process
from oomprobe.runners.workers.serve import FurtherOfAll

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="processes are isolated on Linux only"
)
LEARNS = Request(
    phase=Phase.GROW,
    calls=(Call(step="step", batch_size=1),),
    learns=Learning(turns=("step",), full_steps=1),
)
PROMPT_S = 5  # enough for a busy machine, and much less than LONG_S
LONG_S = 20  # until a sleeping process would end by itself


def told(value):
    """Return a message with a value."""
    return Lost(text=json.dumps(value))


def value_of(message):
    return json.loads(message.text)


# --- in children ---


def answers(wire):
    while (message := receive(wire)) is not None:
        send(wire, message)


def aborts(wire):
    os.write(2, b"a library: no licence\n")
    os.abort()


def exits(wire):
    os._exit(3)


def raises(wire):
    raise KeyError("labels")


def answers_and_dies(wire):
    message = receive(wire)
    send(
        wire, told([value_of(message), "x" * 100_000])
    )  # waits in the socket until the parent listens
    os._exit(3)


def sleeps(wire):
    time.sleep(LONG_S)


def ignores_sigterm(wire):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleeps(wire)


def computes(wire):
    until = time.process_time() + 1.2
    while time.process_time() < until:
        pass
    send(wire, told("nothing"))


def waits_for_a_worker(wire):
    if not (worker := os.fork()):
        computes(wire)
        os._exit(0)
    os.waitpid(worker, 0)
    time.sleep(LONG_S)


def hangs_up(wire):
    wire.close()
    time.sleep(LONG_S)


def writes_much(wire):
    os.write(2, b"first words\n" + b"a line of a log\n" * (2 * TAIL_BYTES // 16) + b"last words\n")
    time.sleep(LONG_S)


def sleeper(**options):
    process = subprocess.Popen(["sleep", str(LONG_S)], **options)
    process.returncode = 0  # no ResourceWarning
    return process.pid


def starts_three(wire):
    """Start a child, a child in another process group, and an orphan."""
    orphan = subprocess.run(
        ["sh", "-c", f"sleep {LONG_S} >&- & echo $!"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    send(wire, told([sleeper(), sleeper(process_group=0), int(orphan)]))
    receive(wire)
    os._exit(3)


def passes_on_its_pipes(wire):
    sleeper(pass_fds=[wire.fileno()], start_new_session=True)
    os._exit(3)


def reports_its_setup(wire):
    ignored = [
        name
        for name in ("SIGINT", "SIGTERM")
        if signal.getsignal(getattr(signal, name)) == signal.SIG_IGN
    ]
    killed_first = Path("/proc/self/oom_score_adj").read_text()
    send(wire, told([os.getsid(0) == os.getpid(), ignored, killed_first]))


def steps_at_call(number):
    """Return a rank whose optimizer steps at this call, and which tells how many calls it made."""

    def rank(wire):
        further = FurtherOfAll(wire)
        while receive(wire) is not None:  # for each trial
            calls, made = LEARNS.calls, []
            while calls:
                for call in calls:
                    is_full = len(made) + 1 == number
                    made.append(CallRecord(step=call.step, stepped=number if is_full else None))
                calls = further(LEARNS, made)
            send(wire, told(len(made)))

    return rank


# --- scenes ---


def calls_of_ranks(*numbers):
    ranks = {rank: Process.forked(steps_at_call(number)) for rank, number in enumerate(numbers)}
    crew = Crew(ranks)
    texts = []
    for trial in range(2):
        answers = crew.ask(
            dict.fromkeys(ranks, told(trial)),
            time.monotonic() + PROMPT_S,
            further=lambda every: further(LEARNS, merged(every), time.monotonic()),
        )
        texts += [value_of(answers[rank]) for rank in ranks]
    crew.end()
    return texts


def asked(child, value, patience=PATIENCE, **limits):
    """Return the answer or exit status of a child; None as the value asks nothing."""
    messages = {} if value is None else {0: told(value)}
    return Crew({0: child}, patience=patience).ask(
        messages, limits.pop("deadline_s", None), **limits
    )[0]


def listened(act, *, within_s=None, stuck_s=None, after_s=0.0, **waits):
    """Return the answer or exit status of a child, which must come soon."""
    patience = Patience(**waits)
    child, began_s = Process.forked(act, patience=patience), time.monotonic()
    child.tell(told("something"))
    time.sleep(after_s)
    deadline_s = None if within_s is None else began_s + within_s
    answer = asked(child, None, patience, deadline_s=deadline_s, stuck_s=stuck_s)
    assert time.monotonic() - began_s < PROMPT_S
    assert is_gone(child.session) or not isinstance(answer, ExitStatus)
    return answer


def asked_twice():
    before, child = open_files(), Process.forked(answers)
    heard = [value_of(asked(child, number)) for number in range(2)]
    return heard, child.end().why, open_files() == before


def left_behind(end):
    """Return whether descendants ran, whether all have ended with the child, and whether another process is spared."""
    other, child = sleeper(), Process.forked(starts_three)
    pids = value_of(asked(child, None))
    ran = not any(map(is_gone, [child.session, *pids]))
    if end == "death":
        asked(child, "die")
    else:
        child.end("timed out")
    spared = not is_gone(other)
    os.kill(other, signal.SIGKILL)
    until_s = time.monotonic() + PROMPT_S
    while not (ended := all(map(is_gone, [child.session, *pids]))) and time.monotonic() < until_s:
        time.sleep(0.01)
    return ran, ended, spared


def ends_without_cleaning_up(act, file):
    with open(file, "w") as log, contextlib.redirect_stdout(log):
        atexit.register(log.write, "at exit ")
        sys.stdout.write("buffered before ")
        try:
            return listened(act).code
        finally:
            log.write("finally ")


# --- tests ---


def play(scene, *args, **options):
    """Play a scene in a child, which has computed nothing."""
    return start(partial(scene, *args, **options)).result()


def test_ranks_make_as_many_calls_as_the_one_that_needs_most():
    assert play(calls_of_ranks, 1, 4, 2) == [4, 4, 4] * 2


def test_it_answers_twice_and_leaves_no_file_open():
    assert play(asked_twice) == ([0, 1], None, True)


def test_it_leads_a_session_ignores_ctrl_c_and_is_killed_first():
    assert value_of(play(listened, reports_its_setup)) == [True, ["SIGINT"], "1000\n"]


@pytest.mark.parametrize(
    ("act", "number", "code", "words"),
    [
        (aborts, signal.SIGABRT, None, "a library: no licence"),
        (exits, None, 3, ""),
        (raises, None, 70, "KeyError: 'labels'"),
    ],
)
def test_an_exit_status_has_signal_code_and_stderr(act, number, code, words):
    seen = play(listened, act)
    assert (seen.signal, seen.code, seen.why, seen.oom_kills) == (number, code, None, 0)
    assert words in seen.stderr
    assert 2**20 < seen.peak_resident_bytes < 2**33


def test_an_answer_sent_whole_before_a_death_counts():
    assert value_of(play(listened, answers_and_dies, after_s=0.3))[0] == "something"


def test_the_trace_of_a_hang_is_kept_and_not_passed_on(capsys):
    seen = play(listened, sleeps, within_s=0.3)
    assert (seen.why, seen.signal) == ("timed out", signal.SIGTERM)
    assert "most recent call first" in seen.stderr
    assert "in sleeps" in seen.stderr
    assert "most recent call first" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("act", "options", "why", "number"),
    [
        (ignores_sigterm, {"within_s": 0.3, "ending_s": 0.3}, "timed out", signal.SIGKILL),
        (sleeps, {"stuck_s": 0.4, "cpu_reading_s": 0.1}, "stuck", signal.SIGTERM),
        (hangs_up, {"ending_s": 0.3}, None, signal.SIGKILL),
    ],
)
def test_a_process_that_does_not_end_is_terminated(act, options, why, number):
    seen = play(listened, act, **options)
    assert (seen.why, seen.signal) == (why, number)


@pytest.mark.parametrize("act", [computes, waits_for_a_worker])
def test_a_busy_process_is_not_stuck(act):
    assert value_of(play(listened, act, stuck_s=0.7, cpu_reading_s=0.1)) == "nothing"


def test_the_end_of_its_stderr_is_kept_and_all_of_it_passed_on(capsys):
    kept = play(listened, writes_much, within_s=0.5).stderr
    assert TAIL_BYTES - 1000 < len(kept) <= TAIL_BYTES
    assert "last words" in kept
    assert "first words" not in kept
    assert "first words\na line of a log\n" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["death", "timed out"])
def test_all_its_descendants_end_and_no_other_process(end):
    assert play(left_behind, end) == (True, True, True)


def test_a_process_that_holds_its_pipes_does_not_hide_its_death():
    assert play(listened, passes_on_its_pipes).code == 3


def test_a_child_runs_and_writes_nothing_of_its_parents(tmp_path):
    assert play(ends_without_cleaning_up, raises, tmp_path / "log") == 70
    assert (tmp_path / "log").read_text() == "buffered before finally "
