"""scripts/gpu-check without a card: what it writes, and that no process outlives its limit."""

import json
import multiprocessing
import os
import subprocess
import sys
import time

import pytest
from gpu_check import check as gpu_check
from gpu_check import plan
from processes import is_gone, until

STARTS_ANOTHER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_grandchildren_end_on_time_out():
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        gpu_check.within([sys.executable, "-c", STARTS_ANOTHER], 1.0)
    assert until(lambda: is_gone(int(raised.value.stdout)), within_s=5)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda: {"answer": 3}, {"answer": 3}),
        (lambda: {"answer": 1 / 0}, {"error": "ZeroDivisionError: division by zero"}),
        (lambda: os._exit(5), {"error": "exit code 5 without an answer"}),
        (lambda: time.sleep(60), {"error": "not done in 0 s"}),
    ],
    ids=["answers", "raises", "exits", "hangs"],
)
def test_a_child_answers_or_its_end_is_reported(monkeypatch, function, said):
    monkeypatch.setattr(gpu_check, "multiprocessing", multiprocessing.get_context("fork"))
    assert gpu_check.in_child(function, limit_s=0.2 if "not done" in str(said) else 60) == said


@pytest.mark.parametrize("answer", [1, 2, 99, 100, 101, 999])
@pytest.mark.parametrize("frontier", [0, 1, 100])
def test_the_search_around_an_answer_ends_at_the_frontier(answer, frontier):
    tried = []

    def runs(size):
        tried.append(size)
        return size <= frontier

    *_, found = gpu_check.search_around(answer, 1, runs)
    assert found == frontier
    assert tried[0] == answer
    assert {frontier + 1, max(1, frontier)} <= {*tried}


PART = {"model": "conv_net", "limit_bytes": None, "resolution": 0.0, "time_limit_s": 1, "cold_s": 1}
RESULT = {"budget_bytes": 10, "state_verified": True, "trials": []}


@pytest.fixture
def check(tmp_path):
    """Runs the check with given answers of the children; returns its exit code and evidence."""
    path = tmp_path / "evidence.json"

    def run(answers):
        def in_child(function, *args, limit_s):
            answer = answers.get(function.__name__, {"error": "left out"})
            return dict(answer(*args) if callable(answer) else answer)

        card = {"card": "Card", "torch": "0", "driver": "0"}
        options = {"parts": [PART], "recorded": {}, "with_tests": False, "in_child": in_child}
        status = gpu_check.check(card, path, time.monotonic(), **options)
        return status, json.loads(path.read_text())

    return run


FOUND = {"answer": 7, "fraction_restored": True, "outside_steps_s": 0.1, "result": RESULT}


def test_an_answer_that_runs_cold(check):
    status, kept = check(
        {"probe": FOUND, "train": lambda model, size, *_: {} if size <= 8 else {"error": "OOM"}}
    )
    [part] = kept["parts"]
    assert (status, kept["wrong"]) == (0, [])
    assert (part["cold_frontier"], part["answer_share_of_frontier"]) == (8, 0.875)
    assert part["cold_runs_capped"] == {"7": "ran", "8": "ran", "10": "OOM", "9": "OOM"}
    assert part["cold_runs_whole_card"] == {"7": "ran"}


@pytest.mark.parametrize(
    ("found", "dies_after", "said"),
    [
        (FOUND, 10, "the answer 7 died, cold_runs_capped: OutOfMemoryError: x"),
        (FOUND, 50, "the answer 7 died, cold_runs_whole_card: OutOfMemoryError: x"),
        ({"error": "NothingFitsError: x"}, None, "NothingFitsError: x"),
        (
            {**FOUND, "fraction_restored": False},
            None,
            "the user's memory fraction was not restored",
        ),
        (
            {**FOUND, "result": {**RESULT, "state_verified": False}},
            None,
            "the state was not verified",
        ),
    ],
    ids=["dies capped", "dies on the whole card", "no answer", "fraction", "state"],
)
def test_broken_promises_are_reported(check, found, dies_after, said):
    def train(model, size, steps, cap_bytes):
        dies = size > 7 or (size == 7 and steps == dies_after)
        return {"error": "OutOfMemoryError: x"} if dies else {}

    status, kept = check({"probe": found, "train": train})
    assert (status, kept["wrong"]) == (1, [f"conv_net, whole card: {said}"])


def test_a_plan_keeps_what_it_found_whatever_a_part_does(capsys):
    """The evidence is written before each process starts; a part that fails or takes its time ends alone."""
    evidence, written, limits = {}, [], []

    def in_child(function, *args, limit_s):
        limits.append(limit_s)
        return function(*args)

    def good(run, found):
        found["one"] = run(lambda: {"answer": 1})
        found["two"] = run(lambda: {"answer": 2})

    def bad(run, found):
        found["one"] = run(lambda: {"answer": 1})
        raise KeyError("two")

    parts = {"late": (good, 0), "bad": (bad, 5), "good": (good, 5)}
    plan.carry_out(evidence, lambda: written.append(json.dumps(evidence)), in_child, parts)
    late = {"error": "the time of its part was over"}
    assert (evidence["late"]["one"], evidence["late"]["two"]) == (late, late)
    assert evidence["bad"]["one"] == {"answer": 1}
    assert evidence["bad"]["error"] == "KeyError: 'two'"
    assert (evidence["good"]["one"], evidence["good"]["two"]) == ({"answer": 1}, {"answer": 2})
    assert len(limits) == 3
    assert all(0 < limit_s <= 5 for limit_s in limits)
    # Before each of five processes, and after each part.
    assert len(written) == 8
    assert '"one": {"answer": 1}' in written[-2]
    assert capsys.readouterr().out.splitlines()[-1].startswith("good: ")


def test_the_parts_of_a_plan_end_within_twelve_minutes():
    assert sum(limit_s for _, limit_s in plan.PARTS.values()) < 720
