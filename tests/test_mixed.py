"""All values of an axis in turn, on a runner that only says what runs."""

from collections import Counter

import pytest
from helpers import GIB, ARunner, a_trial, records

from oomprobe.ground import allocator_settings
from oomprobe.probing.mixed import mixed_sizes
from oomprobe.records.axis import Axis
from oomprobe.records.trials import Outcome, Verdict

LENGTHS = Axis("length", (512, 1024, 2048))
ANSWERS = {0: 64, 1: 32, 2: 16}


class Turns(ARunner):
    """A runner whose trials fail at a call if the sizes of the rows take more than a share of the answers."""

    def __init__(self, share, verdict=Verdict.OOM, fails_from=1):
        super().__init__()
        self.share, self.verdict, self.fails_from = share, verdict, fails_from
        self.answers, self.requests = ANSWERS, []

    def run(self, request):
        self.requests.append(request)
        taken = max(call.batch_size / self.answers[call.row] for call in request.calls)
        passed = taken <= self.share or len(self.requests) < self.fails_from
        verdict, steps = (Verdict.FITS, len(request.calls)) if passed else (self.verdict, 7)
        return Outcome(trial=a_trial(verdict=verdict, steps=steps), records=records(steps))


def mixed(runner, answers=ANSWERS, needed=0, **options):
    session = runner.session(**options)
    session.budget.take(runner.measure())
    session.program.needed = needed
    return mixed_sizes(session, LENGTHS, answers)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in allocator_settings.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_answers_that_run_in_two_orders_need_no_note():
    runner = Turns(1)
    assert mixed(runner) == (ANSWERS, [])
    orders = [
        [(call.row, call.batch_size) for call in request.calls] for request in runner.requests
    ]
    assert len(orders) == 2
    assert orders[0] != orders[1]
    for order in orders:  # 50 calls, each value as often
        assert Counter(order) == dict.fromkeys(ANSWERS.items(), 17)
    assert {request.cap_bytes for request in runner.requests} == {18 * GIB}


@pytest.mark.parametrize(("values", "needed", "rounds"), [(3, 100, 34), (40, 0, 4), (10, 0, 5)])
def test_turns_are_longer_for_a_long_step_and_for_many_values(values, needed, rounds):
    answers = dict.fromkeys(range(values), 8)
    runner = Turns(1)
    runner.answers = answers
    assert mixed(runner, answers, needed) == (answers, [])
    assert [len(request.calls) for request in runner.requests] == [rounds * values] * 2


@pytest.mark.parametrize(
    ("fails_from", "orders"),
    [(1, [1, 1, 1, 2]), (2, [2, 1, 1, 2])],
    ids=["in the first order", "in the second"],
)
def test_a_smaller_share_is_found_and_noted(fails_from, orders):
    runner = Turns(0.85, fails_from=fails_from)
    sizes, [note] = mixed(runner)
    assert sizes == {0: 52, 1: 26, 2: 13}  # 13 of 16
    assert len(runner.requests) == sum(orders)
    failed = runner.requests[fails_from - 1].calls[7]
    assert f"(at {LENGTHS.label(failed.row)}, in call 8)" in note
    assert (
        "The mixed sizes, at most 81 % of them, ran 51 calls in random order, 2 times. PYTORCH_"
        in note
    )
    assert note.endswith("loses less")


def test_shares_end_at_a_quarter_and_sizes_are_multiples():
    runner = Turns(0.3)
    assert mixed(runner)[0] == {0: 16, 1: 8, 2: 4}
    runner = Turns(0.2)
    sizes, [note] = mixed(runner)
    assert (sizes, len(runner.requests)) == ({}, 13)
    assert "Nor does any share of them down to 25 % run" in note
    assert mixed(Turns(0.9), multiple_of=8)[0] == {0: 56, 1: 24, 2: 8}


def test_where_the_allocator_is_set_no_setting_is_named(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert mixed(Turns(0.9))[1][0].endswith("2 times")


def test_without_time_the_rows_stand():
    sizes, [note] = mixed(Turns(0, Verdict.TIMED_OUT))
    assert (sizes, note) == (
        {},
        "training that meets all values in one process was not tried: the time limit passed",
    )
