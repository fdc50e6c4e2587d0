"""Steps that ignore their batch size, from trials and counts of work made by hand."""

import dataclasses

import pytest
from test_result import a_trial

from oomprobe.errors import UnreliableError
from oomprobe.idle import Idle
from oomprobe.result import Phase
from oomprobe.search import Sizes
from oomprobe.verdict import Verdict
from oomprobe.work import Work


def grown(work_of, doublings, asked):
    """Grow from 1, all in the same memory; the sizes whose work was counted are added to `asked`."""
    trials = []

    def work_at(size):
        asked.append(size)
        return Work(operators=1, elements=work_of(size))

    idle = Idle(trials, Sizes(first=1, last=None, step=1), work_at, kind="device")
    for size in (2**n for n in range(doublings + 1)):
        fields = {"batch_size": size, "phase": Phase.GROW, "verdict": Verdict.FITS, "peak_allocated_bytes": 1}
        trials.append(dataclasses.replace(a_trial(), **fields))
        idle.refuse(nothing_stepped=False)


def test_the_work_of_a_size_is_counted_once():
    asked = []
    grown(lambda size: size, 9, asked)
    assert asked == [1, 8, 64, 512]


def test_data_that_ends_is_told_with_its_last_example():
    with pytest.raises(UnreliableError, match="pass max_batch=100;"):
        grown(lambda size: min(size, 100), 12, [])
