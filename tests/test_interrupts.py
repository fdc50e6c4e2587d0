"""Signals go to real child processes: what is promised is how a process ends."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from oomprobe.interrupts import EXIT_TERMINATED, Interrupts, TimeUp

ROOT = Path(__file__).parents[1]
PATIENCE_S = 30  # a child that has not answered by then hangs
SOON_S = 5  # far below the ten minutes that the steps of these tests sleep

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="POSIX signals")

PREAMBLE = """
import signal, sys, time
from oomprobe.interrupts import Interrupts, TimeUp

def say(text):
    print(text, flush=True)

def work(seconds):  # sleep would end early if a signal came through
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)
"""


class Child:
    """A Python process that tells where it is, line by line."""

    def __init__(self, body):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + textwrap.dedent(body)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.heard = []

    def hear(self, text):
        for line in self.process.stdout:
            self.heard.append(line.strip())
            if line.strip() == text:
                return self
        raise AssertionError(f"{text!r} was not said, but {self.heard}, {self.process.stderr.read()}")

    def send(self, number):
        self.process.send_signal(number)
        return self

    def end(self):
        """What was said, the exit status and stderr."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.heard + out.split("\n")[:-1], self.process.returncode, err


@pytest.fixture
def child():
    children = []

    def start(body):
        children.append(Child(body))
        watchdog = threading.Timer(PATIENCE_S, children[-1].process.kill)
        watchdog.daemon = True
        watchdog.start()
        children[-1].watchdog = watchdog
        return children[-1]

    yield start
    for one in children:
        one.watchdog.cancel()
        one.process.kill()
        one.process.communicate()


SLEEPING_STEP = """
try:
    with Interrupts() as interrupts:
        try:
            with interrupts.allowed(None):
                say("in step")
                time.sleep(600)
        finally:
            say("cleaning")
            work(0.4)
            say("clean")
except BaseException as error:
    say(repr(error))
    raise
"""


def test_ctrl_c_reaches_a_sleeping_step(child):
    said, status, err = child(SLEEPING_STEP).hear("in step").send(signal.SIGINT).end()
    assert said == ["in step", "cleaning", "clean", "KeyboardInterrupt()"]
    assert status == -signal.SIGINT
    assert "KeyboardInterrupt" in err


def test_a_second_ctrl_c_does_not_interrupt_the_clean_up_nor_replace_the_first(child):
    process = child(SLEEPING_STEP).hear("in step").send(signal.SIGINT).hear("cleaning").send(signal.SIGINT)
    said, status, err = process.end()
    assert said == ["in step", "cleaning", "clean", "KeyboardInterrupt()"]
    assert status == -signal.SIGINT
    assert "During handling" not in err


def test_a_second_ctrl_c_does_not_interrupt_the_steps_own_clean_up(child):
    said, *_ = (
        child("""
        with Interrupts() as interrupts:
            with interrupts.allowed(None):
                try:
                    say("in step")
                    time.sleep(600)
                finally:
                    say("cleaning")
                    work(0.4)
                    say("clean")
        """)
        .hear("in step")
        .send(signal.SIGINT)
        .hear("cleaning")
        .send(signal.SIGINT)
        .end()
    )
    assert said == ["in step", "cleaning", "clean"]


def test_sigterm_is_an_exit_that_runs_finally_blocks(child):
    said, status, _ = child(SLEEPING_STEP).hear("in step").send(signal.SIGTERM).end()
    assert said == ["in step", "cleaning", "clean", "SystemExit(143)"]
    assert status == EXIT_TERMINATED == 143


def test_sigterm_while_cleaning_up_after_ctrl_c_is_delivered_afterwards(child):
    process = child(SLEEPING_STEP).hear("in step").send(signal.SIGINT).hear("cleaning").send(signal.SIGTERM)
    said, status, _ = process.end()
    assert said == ["in step", "cleaning", "clean", "SystemExit(143)"]
    assert status == EXIT_TERMINATED


def test_a_signal_between_steps_waits_for_the_next_step(child):
    said, *_ = (
        child("""
        with Interrupts() as interrupts:
            say("between")
            work(0.4)
            say("restored")
            try:
                with interrupts.allowed(None):
                    say("next step")
            except KeyboardInterrupt:
                say("before the next step")
        """)
        .hear("between")
        .send(signal.SIGINT)
        .end()
    )
    assert said == ["between", "restored", "before the next step"]


def test_a_signal_after_the_last_step_is_delivered_on_leaving(child):
    said, status, _ = (
        child("""
        with Interrupts() as interrupts:
            with interrupts.allowed(None):
                pass
            say("after")
            work(0.4)
            say("restored")
        say("never said")
        """)
        .hear("after")
        .send(signal.SIGINT)
        .end()
    )
    assert said == ["after", "restored"]
    assert status == -signal.SIGINT


def test_the_users_handler_is_called_and_the_step_goes_on(child):
    said, status, err = (
        child("""
        signal.signal(signal.SIGTERM, lambda number, frame: say(f"handled {number}"))
        mine = signal.getsignal(signal.SIGTERM)
        with Interrupts() as interrupts:
            with interrupts.allowed(None):
                say("in step")
                work(0.4)
                say("step over")
        assert signal.getsignal(signal.SIGTERM) is mine
        """)
        .hear("in step")
        .send(signal.SIGTERM)
        .end()
    )
    assert (said, status, err) == (["in step", "handled 15", "step over"], 0, "")


def test_after_a_handler_that_returned_signals_and_deadlines_still_reach_the_step(child):
    said, *_ = (
        child("""
        signal.signal(signal.SIGTERM, lambda number, frame: say("handled"))
        with Interrupts() as interrupts:
            try:
                with interrupts.allowed(time.monotonic() + 2):
                    say("in step")
                    time.sleep(600)
            except TimeUp:
                say("time up")
        """)
        .hear("in step")
        .send(signal.SIGTERM)
        .hear("handled")
        .send(signal.SIGTERM)
        .end()
    )
    assert said == ["in step", "handled", "handled", "time up"]


def test_an_ignored_ctrl_c_stays_ignored(child):
    said, status, _ = (
        child("""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with Interrupts() as interrupts:
            with interrupts.allowed(None):
                say("in step")
                work(0.4)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        say("not interrupted")
        """)
        .hear("in step")
        .send(signal.SIGINT)
        .end()
    )
    assert (said, status) == (["in step", "not interrupted"], 0)


def test_a_timer_left_by_an_interrupted_clean_up_does_not_kill_the_process(child):
    said, status, _ = child("""
        with Interrupts() as interrupts:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        work(0.4)
        say("alive")
    """).end()
    assert (said, status) == (["alive"], 0)


# --- time limits, in this process ---


@pytest.fixture(autouse=True)
def _signals_as_before():
    """Python's own handlers, even where the tests run in the background; and the same ones afterwards."""
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGALRM: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    left = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert left == usual


def seconds_until_time_is_up(deadline_in_s, step):
    started = time.monotonic()
    with Interrupts() as interrupts, pytest.raises(TimeUp), interrupts.allowed(started + deadline_in_s):
        step()
    return time.monotonic() - started


def test_a_sleeping_step_ends_at_its_deadline():
    assert 0.2 <= seconds_until_time_is_up(0.2, lambda: time.sleep(600)) < SOON_S


def test_a_deadline_that_has_passed_ends_the_step_at_once():
    assert seconds_until_time_is_up(-1, lambda: time.sleep(600)) < SOON_S


def test_a_step_that_swallows_the_time_limit_is_still_over_it():
    def step():
        with contextlib.suppress(BaseException):
            time.sleep(600)

    assert seconds_until_time_is_up(0.05, step) < SOON_S


def test_time_up_is_no_exception_that_a_step_would_catch():
    assert not issubclass(TimeUp, Exception)


def test_a_step_in_time_is_left_alone_and_the_timer_is_off_after_it():
    with Interrupts() as interrupts:
        with interrupts.allowed(time.monotonic() + 0.1):
            assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.1
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        time.sleep(0.15)


@pytest.mark.parametrize("seconds", [1e9, 1e10, float(sys.maxsize), 1e300])
def test_a_limit_longer_than_the_kernels_timer_is_none(seconds):
    with Interrupts() as interrupts, interrupts.allowed(time.monotonic() + seconds):
        ran = True
    assert ran


def test_without_a_deadline_no_timer_is_set():
    with Interrupts() as interrupts, interrupts.allowed(None):
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_the_steps_own_exception_is_not_hidden_by_a_deadline_that_passed():
    def step():
        try:
            time.sleep(600)
        except TimeUp:
            raise KeyError("labels") from None

    with Interrupts() as interrupts, pytest.raises(KeyError), interrupts.allowed(time.monotonic() + 0.02):
        step()


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_handlers_are_there_inside_and_gone_after_any_way_out(error):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        with Interrupts() as interrupts:
            assert [signal.getsignal(number) for number in numbers] == [interrupts._receive] * 3
            if error:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_ctrl_c_while_handlers_are_restored_leaves_all_of_them_restored(monkeypatch):
    real = signal.signal
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]

    def restore_and_interrupt(number, handler):
        real(number, handler)
        if number == signal.SIGINT:
            signal.raise_signal(signal.SIGINT)

    interrupts = Interrupts()
    interrupts.__enter__()
    monkeypatch.setattr("oomprobe.interrupts.signal.signal", restore_and_interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupts.__exit__(None, None, None)
        after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    finally:
        monkeypatch.undo()
        for number, handler in zip((signal.SIGINT, signal.SIGTERM, signal.SIGALRM), before, strict=True):
            signal.signal(number, handler)
    assert after == before


def test_the_users_alarm_handler_and_timer_are_left_alone():
    rang = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rang.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with Interrupts() as interrupts, pytest.raises(TimeUp), interrupts.allowed(time.monotonic() + 0.05):
            time.sleep(0.3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rang == [signal.SIGALRM]


def test_a_watchdog_that_would_kill_the_process_goes_on_ticking():
    signal.setitimer(signal.ITIMER_REAL, 100)
    try:
        with Interrupts() as interrupts:
            with interrupts.allowed(time.monotonic() + 50):
                pass
            with pytest.raises(TimeUp), interrupts.allowed(time.monotonic() - 1):
                pass
        left, _ = signal.getitimer(signal.ITIMER_REAL)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert 50 < left <= 100


# --- other threads ---


def in_a_thread(call):
    outcome = []

    def run():
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE_S)
    return outcome[0]


def test_outside_the_main_thread_a_step_runs_and_no_handler_changes():
    before = signal.getsignal(signal.SIGINT)

    def probe():
        with Interrupts() as interrupts, interrupts.allowed(time.monotonic() + 60):
            return signal.getsignal(signal.SIGINT) is before, signal.getitimer(signal.ITIMER_REAL)

    assert in_a_thread(probe) == (True, (0, 0))


def test_outside_the_main_thread_a_time_limit_is_seen_after_the_step():
    over = []

    def probe():
        with Interrupts() as interrupts, interrupts.allowed(time.monotonic() + 0.05):
            time.sleep(0.1)
            over.append(True)

    assert isinstance(in_a_thread(probe), TimeUp)
    assert over == [True]


def test_a_signal_from_this_process_reaches_the_step():
    def step():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(SOON_S)

    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts, interrupts.allowed(None):
        step()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM], ids=["Ctrl-C", "a time limit"])
def test_work_of_our_own_in_the_midst_of_a_step_is_done_before_a_signal_stops_the_step(number):
    done = []

    def step(interrupts):
        with interrupts.held_back():
            signal.raise_signal(number)
            done.append("work")
        done.append("step")

    with (
        Interrupts() as interrupts,
        pytest.raises(TimeUp if number == signal.SIGALRM else KeyboardInterrupt),
        interrupts.allowed(time.monotonic() + 60),
    ):
        step(interrupts)
    assert done == ["work"]


def test_work_of_our_own_outside_a_step_delivers_nothing_early():
    done = []
    with contextlib.suppress(KeyboardInterrupt), Interrupts() as interrupts:
        with interrupts.held_back():
            signal.raise_signal(signal.SIGINT)
        done.append("cleaned up")
    assert done == ["cleaned up"]


def test_a_time_limit_that_passes_while_work_of_our_own_begins_is_not_lost():
    """It comes once, and a step that hangs afterwards would hang for ever."""

    class Passing(Interrupts):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "_open" and not value and vars(self).get("_is_in_step"):
                self._is_in_step = False
                self._receive(signal.SIGALRM, None)

    interrupts, done = Passing(), []

    def step():
        interrupts._is_in_step = True
        with interrupts.held_back():
            done.append("work")
        done.append("step")

    with pytest.raises(TimeUp), interrupts, interrupts.allowed(time.monotonic() + 60):
        step()
    assert done == ["work"]
