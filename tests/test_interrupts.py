"""Ctrl-C, SIGTERM, SIGHUP and time limits interrupt the step of a probe, but never the code that restores state."""

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import find_hastily
from ledger import Box, LedgerDevice, Log
from processes import start

import oomprobe
from oomprobe.records.patience import Patience

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="POSIX signals")

PATIENCE_S = 30  # a child that runs longer hangs
SOON_S = 5  # far below the ten minutes that the steps of these tests sleep
TERMINATED = 143


def probe(act, **options):
    """Probe a step that calls `act` and trains; the confirmation makes only the calls that `confirm_steps` takes."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, batch_size):
        act()
        model(torch.ones(batch_size, 2)).sum().backward()
        optimizer.step()

    given = {"device": LedgerDevice(), "max_batch": 1, "steps": 1, "confirm_steps": 1}
    return find_hastily(Patience(look_calls=1), model, step, **{**given, **options})


def work(seconds):
    """Sleep for the whole time, even if a signal arrives."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        time.sleep(0.01)


class SlowToLoad:
    """Takes a while to restore, and says when it starts and ends."""

    def __init__(self, say):
        self.say, self.seen = say, Box(0)  # only `load_state_dict` can restore the count

    def state_dict(self):
        return {"count": self.seen.held}

    def load_state_dict(self, state):
        self.say("cleaning")
        work(0.4)
        self.seen.held = state["count"]
        self.say("clean")


# --- signals, in a child process ---


worked = Log()  # in this process


def sleeps(say):
    say("in step")
    time.sleep(600)


def cleans_up(say):
    try:
        sleeps(say)
    finally:
        say("step cleaning")
        work(0.4)
        say("step clean")


def works(say):
    if not worked:
        worked.append(True)
        say("in step")
        work(0.4)
        say("step over")


class Started:
    """A child process that probes and reports its progress line by line; it returns 0 after an answer."""

    def __init__(self, act, prepare=lambda say: None):
        reading, writing = os.pipe()
        self.child = start(
            self._probe, act, prepare, lambda text: os.write(writing, f"{text}\n".encode())
        )
        os.close(writing)
        self._lines, self.heard = os.fdopen(reading), []
        self._watchdog = threading.Timer(PATIENCE_S, self.child.kill)
        self._watchdog.start()

    @staticmethod
    def _probe(act, prepare, say):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        prepare(say)
        slow = SlowToLoad(say)

        def counted():
            slow.seen.held += 1
            act(say)

        try:
            say(f"answer {probe(counted, preserve=slow).batch_size}")
        except BaseException as error:
            say(repr(error))
            return TERMINATED if isinstance(error, SystemExit) else 1
        assert slow.seen.held == 0
        return 0

    def hear(self, text):
        for line in self._lines:
            self.heard.append(line.strip())
            if line.strip() == text:
                return self
        raise AssertionError(f"the child did not say {text!r} but {self.heard}")

    def send(self, number):
        self.child.kill(number)
        return self

    def end(self):
        """Wait, and return everything the child said and its exit status."""
        self.heard += [line.strip() for line in self._lines]
        status = self.child.result()
        self._watchdog.cancel()
        self._lines.close()
        return self.heard, status


INT, TERM = signal.SIGINT, signal.SIGTERM
RESTORED = ["cleaning", "clean"]
CTRL_C, SIGTERM = ["KeyboardInterrupt()"], ["SystemExit(143)"]


@pytest.mark.parametrize(
    ("act", "sent", "cleaned", "ended"),
    [
        (sleeps, {"in step": INT, "cleaning": INT}, [], CTRL_C),
        (sleeps, {"in step": TERM}, [], SIGTERM),
        (sleeps, {"in step": signal.SIGHUP}, [], SIGTERM),
        (
            cleans_up,
            {"in step": INT, "step cleaning": INT},
            ["step cleaning", "step clean"],
            CTRL_C,
        ),
        (works, {"cleaning": INT}, ["step over"], CTRL_C),
    ],
    ids=["twice", "SIGTERM", "SIGHUP", "in the step's own clean-up", "while state is restored"],
)
def test_a_signal_interrupts_the_step_but_not_restoring(act, sent, cleaned, ended):
    process = Started(act)
    for when, number in sent.items():
        process.hear(when).send(number)
    assert process.end() == (
        ["in step", *cleaned, *RESTORED, *ended],
        TERMINATED if ended is SIGTERM else 1,
    )


def own_handler(say):
    signal.signal(signal.SIGTERM, lambda number, frame: say(f"handled {number}"))


def ignored(say):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def under_nohup(say):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.mark.parametrize(
    ("prepare", "sent", "heard"),
    [(own_handler, TERM, ["handled 15"]), (ignored, TERM, []), (under_nohup, signal.SIGHUP, [])],
)
def test_the_users_own_signal_handler_stays(prepare, sent, heard):
    said, status = Started(works, prepare).hear("in step").send(sent).end()
    assert status == 0
    assert said[: 2 + len(heard)] == ["in step", *heard, "step over"]
    assert said[-1] == "answer 1"


# --- time limits, in this process ---


def swallows():
    with contextlib.suppress(BaseException):
        time.sleep(600)


@pytest.mark.parametrize("limit", ["trial_time_limit_s", "time_limit_s"])
def test_a_sleeping_step_ends_at_its_time_limit(limit):
    """Even if it swallows what interrupts it."""
    began_s = time.monotonic()
    with pytest.raises(oomprobe.TimeLimitError):
        probe(swallows, **{limit: 0.3})
    assert 0.3 <= time.monotonic() - began_s < SOON_S


def test_a_limit_beyond_the_kernels_timer_is_accepted():
    assert probe(lambda: None, time_limit_s=2**63).batch_size == 1


def test_the_users_own_timer_still_fires():
    rang = Log()
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(True))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        probe(lambda: rang or work(0.5), trial_time_limit_s=60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rang == [True]


def test_in_another_thread_a_limit_is_checked_after_the_step():
    with ThreadPoolExecutor() as threads, pytest.raises(oomprobe.TimeLimitError):
        threads.submit(probe, lambda: time.sleep(0.5), trial_time_limit_s=0.1).result()


def test_a_time_limit_does_not_hide_the_steps_own_exception():
    def fail():
        try:
            time.sleep(600)
        finally:
            raise LookupError("the step's own")

    with pytest.raises(oomprobe.StepFailedError) as caught:
        probe(fail, trial_time_limit_s=0.2)
    assert isinstance(caught.value.__cause__, LookupError)
