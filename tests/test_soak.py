"""The soak: a small one, and its judge, which has to see what is planted."""

import subprocess
import sys
from pathlib import Path

import pytest
from soaking import judge, plan
from soaking.judge import Ran, Violation

SCRIPT = Path(__file__).parent.parent / "scripts" / "soak.py"
CARD = {"total": 1000, "fixed": 100, "per_sample": 10, "stair": 0, "stride": 2}
ASKED = {"memory_fraction": 0.9, "min_batch": 1, "multiple_of": 1}
PROBE = plan.Probe(number=0, seed=0, kind=plan.HERE, card=CARD, options=ASKED, faults=())
RIGHT = 80  # (0.9 * 1000 - 100) / 10
OOM = {"id": 0, "kind": "oom", "call": 3}
KILL = {"id": 1, "kind": "signal", "role": "child", "signal": "SIGKILL", "call": 3}


def soak(*arguments, timeout=240):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.slow
def test_a_small_soak_finds_nothing():
    done = soak("--probes", 5, "--faults", 15, "--seed", 7)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "15 faults injected, 0 never came to happen, 0 violations" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("process", "left behind: process"),
        ("file", "left behind: temporary file planted"),
        ("open file", "the process was not as before: open files"),
        ("flag", "the process was not as before: flags: {'umask'"),
        ("answer", "a wrong answer"),
        ("exception", "an exception outside the contract: builtins.TypeError"),
    ],
)
def test_what_is_planted_is_seen(what, said):
    done = soak("--plant", what)
    assert done.returncode == 1
    assert said in done.stdout


@pytest.mark.slow
def test_a_hang_is_seen_and_ended():
    done = soak("--plant", "hang", "--watchdog", 8)
    assert done.returncode == 1
    assert "it hung" in done.stdout


def test_the_same_seed_draws_the_same_probe():
    assert plan.probe(3, 5, 4) == plan.probe(3, 5, 4)
    assert plan.probe(3, 5, 4) != plan.probe(4, 5, 4)


# --- the judge ---


def answered(size, *, notes=(), contaminated=False, trials=(), **seen):
    confirmed = {"batch_size": size, "phase": "confirm", "verdict": "fits", "leaked_bytes": 0}
    report = {
        "how": "answer",
        "batch_size": size,
        "contaminated": contaminated,
        "budget_bytes": 900,
        "notes": list(notes),
        "verified": True,
        "trials": [*trials, confirmed],
        "left": [],
        "late": [],
        "ended_s": 10.0,
    }
    return ran(report, **seen)


def failed(name, text="", *, trials=(), **seen):
    classes = [f"oomprobe.errors.{name}", "oomprobe.errors.OomProbeError", "builtins.Exception"]
    report = {"how": "error", "classes": classes, "text": text, "trials": list(trials)}
    return ran({**report, "left": [], "late": [], "ended_s": 10.0}, status=3 << 8, **seen)


def ran(report, *, status=0, happened=(), past=(), left=(), asked=(), **seen):
    return Ran(
        probe=PROBE,
        status=status,
        report=report,
        happened=list(happened),
        past=list(past),
        left=list(left),
        asked=ASKED | dict(asked),
        **seen,
    )


def judged(one):
    return judge.outcome(one, survives=None)


def test_the_right_answer():
    assert judge.scan(answered(1), 900) == RIGHT
    assert judged(answered(RIGHT, happened=[OOM, KILL])) == "right"


@pytest.mark.parametrize("size", [RIGHT - 1, RIGHT + 1, 1, 800])
@pytest.mark.parametrize("happened", [(), (OOM,), (KILL,)])
def test_a_wrong_answer(size, happened):
    with pytest.raises(Violation, match="a wrong answer"):
        judged(answered(size, happened=happened))


def test_a_lower_answer_has_to_say_why():
    told = [f"batch {RIGHT} passed as a trial and failed in confirmation"]
    assert judged(answered(RIGHT - 1, notes=told, happened=[OOM])).startswith("lower")
    assert judged(answered(40, notes=["time limit: bisecting stopped between 40"])).startswith("lower")
    with pytest.raises(Violation, match="a wrong answer"):
        judged(answered(RIGHT - 1, notes=told))  # nothing happened that excuses it
    with pytest.raises(Violation, match="a wrong answer"):
        judged(answered(RIGHT + 1, notes=["time limit: bisecting stopped between 40"]))


def test_an_answer_has_to_be_confirmed_and_the_state_verified():
    one = answered(RIGHT)
    one.report["trials"] = []
    with pytest.raises(Violation, match="no confirmation"):
        judged(one)
    one = answered(RIGHT)
    one.report["verified"] = False
    with pytest.raises(Violation, match="not verified"):
        judged(one)


@pytest.mark.parametrize(
    "name", ["TimeLimitError", "DeviceLostError", "UnreliableError", "StepFailedError", "NothingFitsError"]
)
def test_an_error_needs_a_reason(name):
    with pytest.raises(Violation, match=f"{name} without a reason"):
        judged(failed(name))


def test_errors_with_a_reason():
    died = {"batch_size": 4, "phase": "grow", "verdict": "crashed"}
    assert judged(failed("TimeLimitError", asked={"time_limit_s": 1.0})) == "TimeLimitError"
    assert judged(failed("StepFailedError", trials=[died, died], happened=[KILL])) == "StepFailedError"
    with pytest.raises(Violation, match="without a reason"):
        judged(failed("StepFailedError", trials=[died], happened=[KILL]))  # one death is to be survived


def test_an_exception_outside_the_contract():
    one = failed("TimeLimitError")
    one.report["classes"] = ["builtins.KeyError", "builtins.Exception"]
    with pytest.raises(Violation, match=r"outside the contract: builtins\.KeyError"):
        judged(one)


def test_hangs_and_leftovers():
    with pytest.raises(Violation, match="it hung"):
        judged(ran(None, status=None))
    with pytest.raises(Violation, match="left behind: process 7"):
        judged(answered(RIGHT, left=["process 7 (sleep)"]))
    one = answered(RIGHT)
    one.report["left"] = ["open files: {'9': (None, '/dev/null')}"]
    with pytest.raises(Violation, match="not as before: open files"):
        judged(one)


def to_probe(name):
    return {"id": 2, "kind": "signal", "role": "probe", "signal": name, "call": 3}


def test_signals_end_a_probe_in_order():
    assert judged(ran(None, status=9, happened=[to_probe("SIGKILL")])) == "ended by SIGKILL"
    left = {"how": "interrupted", "left": [], "late": [], "ended_s": 1.0}
    assert judged(ran(left, status=130 << 8, happened=[to_probe("SIGINT")])) == "exit code 130"
    with pytest.raises(Violation, match="nobody sent"):
        judged(ran(None, status=11, happened=[to_probe("SIGKILL")]))
    with pytest.raises(Violation, match="in the midst of its trials"):
        judged(ran(None, status=15, happened=[to_probe("SIGTERM")]))
    with pytest.raises(Violation, match=r"SIGINT was sent 1\.00 s before the end, and was lost"):
        judged(answered(RIGHT, happened=[to_probe("SIGINT")], sent_s={"SIGINT": 9.0}))
