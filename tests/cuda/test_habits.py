"""Habits of loops, in each form of a probe: the answer trains in a plain loop in which no error is made, the next size does not."""

import contextlib
from pathlib import Path

import pytest
import torch
from bed import forked
from workers.forks import install
from zoo import run_loop

import oomprobe

from . import habits

FORK = {"memory": "1GiB", "limit_s": 120}
FILE = Path(habits.__file__)
OPTIONS = {"progress": "off", "resolution": 0.02}


def alone(name):
    return oomprobe.find_max_batch(*habits.HABITS[name](), **OPTIONS)


def named(name):
    """Beside a small step, which finds what the other keeps."""
    model, step = habits.HABITS[name]()

    def evaluate(model, batch_size):
        with torch.no_grad():
            model(torch.randn(8, habits.WIDTH, device="cuda"))

    return oomprobe.find_max_batch(model, {"train": step, "eval": evaluate}, **OPTIONS)


def accumulated(name):
    return oomprobe.find_max_batch(*habits.HABITS[name](), global_batch=8192, **OPTIONS)


def isolated(name):
    install()
    return oomprobe.probe_target(f"{FILE}:{name}", device="cuda", **OPTIONS)


def on_ranks(name):
    options = OPTIONS | {"start_batch": 4096, "resolution": 0.05}
    return oomprobe.probe_target(f"{FILE}:{name}", nproc_per_node=2, **options)


class MadeError(BaseException):
    """Ends the loop at its first out-of-memory error, which it would catch, perhaps for ever."""


def trains(name, batch_size, cap_bytes):
    """Return whether the loop of a script makes no out-of-memory error, caught or not."""
    model, step = habits.HABITS[name]()
    made = []

    def end(error, *args):
        made.append(error)
        raise MadeError

    torch.OutOfMemoryError.__init__ = end
    torch.cuda.set_per_process_memory_fraction(cap_bytes / torch.cuda.mem_get_info()[1])
    with contextlib.suppress(MadeError):
        run_loop(step, 12, model, batch_size)
    return not made


FORMS = [
    *((name, form) for name in habits.HABITS for form in (alone, named, accumulated)),
    *((name, isolated) for name in ("halves", "keeps")),
    pytest.param("halves", on_ranks, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "form"), FORMS, ids=lambda part: getattr(part, "__name__", part))
def test_the_answer_trains_and_the_next_size_does_not(name, form):
    memory = {"memory": "1GiB,1GiB"} if form is on_ranks else {}
    result = forked(form, name, **{**FORK, **memory})
    assert result.limited_by == "memory"
    failing = min(
        t.batch_size
        for t in result.trials
        if t.verdict == "out of memory" and t.batch_size > result.batch_size
    )
    assert failing <= 1.06 * result.batch_size
    for size, is_trained in ((result.batch_size, True), (failing, False)):
        assert forked(trains, name, size, result.budget_bytes, **FORK) is is_trained, size
