"""A step called again and again keeps its variables as the loop does that it stands for."""

import functools
import random
import sys

import pytest
import torch

import oomprobe
from oomprobe.runners.loop_variables import LoopVariables

CALLS = 4


class Counted:
    """Knows how many of its kind are alive."""

    alive = 0

    def __init__(self):
        Counted.alive += 1

    def __del__(self):
        Counted.alive -= 1


def noted(seen):
    """Note how many are alive, and return nothing."""
    seen.append(Counted.alive)


def call(loop, step, seen):
    with loop.keeping():
        loop.returned = step(seen, 1)


def called(step, *, is_loop=True):
    """Return what a step sees that is called again and again, and how many are alive at the end."""
    loop, seen = LoopVariables(oomprobe.Step(step, is_loop=is_loop)), []
    for _ in range(CALLS):
        call(loop, step, seen)
        noted(seen)
    for name in loop.names():
        loop.drop(name)
    return seen, Counted.alive


# --- bodies that are made at random, as functions and as loops ---


def random_body(rng):
    """Return statements over a few variables, each of which notes how many objects are alive."""
    names, lines = "abcd", []
    for _ in range(rng.randint(3, 9)):
        name, other = rng.sample(names, 2)
        statement = rng.choice(
            [
                f"{name} = Counted()",
                f"{name} = Counted()",
                f"{name} = [Counted(), Counted()]",
                f"{name} = {other} = Counted()",
                f"{name}, {other} = Counted(), Counted()",
                f"{name} = Counted() if number % 2 else None",
                f"if number % 3 == 1: {name} = Counted()",
                f"if number % 2: {name} = None",
                f"{name} = Counted(); del {name}",
                f"for {name} in (Counted(), Counted()): pass",
                f"{name} = [Counted() for {other} in range(2)]",
                f"try: {name} = Counted(); raise ValueError\n        except ValueError as {other}: pass",
                f"with open(os.devnull) as {name}: {other} = Counted()",
            ]
        )
        lines += [statement, "noted(seen)"]
    return "".join(f"        {line}\n" for line in lines)


@pytest.mark.parametrize("seed", range(100))
def test_a_random_body_keeps_what_a_loop_keeps(seed):
    body = random_body(random.Random(seed))
    source = f"""
import os
def loop(seen):
    for number in range({CALLS}):
{body}
        noted(seen)

numbers = []
def step(seen, batch_size):
        number = len(numbers)
        numbers.append(number)
{body}
"""
    names = {"Counted": Counted, "noted": noted}
    exec(source, names)
    seen = []
    names["loop"](seen)
    assert called(names["step"]) == (seen, 0)


# --- kinds of steps ---


def step(seen, batch_size, *rest, key=1, **more):
    noted(seen)
    a = Counted()  # noqa: F841
    noted(seen)


class Trainer:
    def method(self, seen, batch_size):
        return step.__call__(seen, batch_size)

    def __call__(self, seen, batch_size):
        noted(seen)
        a = Counted()  # noqa: F841
        noted(seen)


def returns(seen, batch_size):
    noted(seen)
    a = [Counted()]
    noted(seen)
    return a.pop()


def captured(seen, batch_size):
    noted(seen)
    a = Counted()
    noted(seen)
    (lambda: a)()


def recursive(seen, batch_size, depth=1):
    noted(seen)
    a = Counted()  # noqa: F841
    if depth:
        recursive([], batch_size, depth - 1)
    noted(seen)


def deletes(seen, batch_size):
    noted(seen)
    a = Counted()
    noted(seen)
    del a


@functools.wraps(step)
def elsewhere(seen, batch_size):
    """As a compiled step, whose own code does not run."""
    deletes(seen, batch_size)


LOOP = [0, 1, 1] + [1, 1, 1] * (CALLS - 1)
LATE = [0, 1, 1] + [1, 2, 1] * (CALLS - 1)  # until the next call has returned
FUNCTION = [0, 1, 0] * CALLS


@pytest.mark.parametrize(
    ("step", "is_loop", "seen"),
    [
        (step, True, LOOP),
        (step, False, FUNCTION),
        (Trainer(), True, LOOP),
        (Trainer().__call__, True, LOOP),
        (Trainer().method, True, FUNCTION),
        (lambda *args: step(*args), True, FUNCTION),
        (functools.partial(step, key=2), True, LOOP),
        (torch.no_grad()(step), True, LOOP),
        (captured, True, LOOP),
        (recursive, True, LOOP),
        (deletes, True, FUNCTION),
        (elsewhere, True, FUNCTION),
        (returns, True, LATE),
        (returns, False, LATE),
    ],
)
def test_what_a_step_keeps(step, is_loop, seen):
    assert called(step, is_loop=is_loop) == (seen, 0)


def test_variables_that_cannot_be_kept_are_told():
    told = []
    for one in (elsewhere, step, print):
        loop = LoopVariables(oomprobe.Step(one))
        call(loop, one, [])
        told.append("compiled code" in loop.unseen)
    assert told == [True, False, False]


def test_a_debugger_goes_on_tracing():
    """Variables then live until the next call has returned."""
    events = []

    def trace(frame, event, argument):
        if frame.f_code is step.__code__:
            events.append(event)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        seen = called(step)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert seen == (LOOP if sys.version_info >= (3, 12) else LATE, 0)
    assert events == ["call", "line", "line", "line", "return"] * CALLS


def test_a_step_that_fails_leaves_no_trace():
    def fails(seen, batch_size):
        a = Counted()  # noqa: F841
        raise ValueError("wrong")

    before, loop = sys.gettrace(), LoopVariables(oomprobe.Step(fails))
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong"):
            call(loop, fails, [])
        loop.drop("a")
        assert (sys.gettrace(), Counted.alive) == (before, 0)
