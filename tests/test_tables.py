"""A search for each value of an axis, on a runner that says what runs in each row."""

import pytest
from helpers import ARunner, a_trial, records

from oomprobe.errors import TimeLimitError, UnreliableError
from oomprobe.probing.tables import Rows
from oomprobe.records.axis import Axis
from oomprobe.records.trials import Outcome, Verdict

LENGTHS = (512, 1024, 2048)


class Limited(ARunner):
    """A runner whose trials pass up to the limit of each row; a limit may be an error, raised from the second trial of its row on."""

    def __init__(self, *limits, **facts):
        super().__init__(**facts)
        self.limits, self.tried = limits, []

    def run(self, request):
        self.tried.append((request.row, request.batch_size))
        limit = self.limits[request.row]
        if isinstance(limit, BaseException):
            if sum(row == request.row for row, _ in self.tried) > 1:
                raise limit
            limit = 10**9
        verdict = Verdict.FITS if request.batch_size <= limit else Verdict.OOM
        trial = a_trial(
            request.batch_size,
            verdict,
            request.phase,
            steps=len(request.calls),
            cap_bytes=request.cap_bytes,
        )
        return Outcome(trial=trial, records=records(trial.steps))


def table_of(runner, values=LENGTHS, **options):
    opened = runner.session(**options)
    with Rows(Axis("length", values), "a target") as rows:
        rows.search(opened)
    return rows.table()


def first_of_each_row(runner):
    first = {}
    for row, size in runner.tried:
        first.setdefault(row, size)
    return [*first.values()]


@pytest.mark.parametrize(
    ("limits", "values", "starts"),
    [
        ((64, 32, 16), LENGTHS, [1, 32, 16]),
        ((64, 32, 20), (512, 1024, 1536), [1, 32, 21]),
        ((64, 32, 16), ("a", "b", "c"), [1, 64, 32]),
        ((64, 0, 16), (1024, 2048, 512), [1, 32, 128]),  # nothing is learned from the second
    ],
)
def test_a_row_begins_where_the_last_answer_leads(limits, values, starts):
    runner = Limited(*limits)
    table = table_of(runner, values)
    assert table.batch_sizes() == {
        value: limit for value, limit in zip(values, limits, strict=True) if limit
    }
    assert first_of_each_row(runner) == starts
    assert {result.environment["target"] for result in table.rows.values() if result} == {
        "a target"
    }


def test_above_a_value_that_does_not_fit_nothing_is_tried():
    runner = Limited(64, 0, 16)
    table = table_of(runner)
    assert sorted({row for row, _ in runner.tried}) == [0, 1]
    assert table.batch_sizes() == {512: 64}
    assert [*table.rows] == [*LENGTHS]
    assert "batch 1, the smallest allowed, does not fit" in table.unfit[1024]
    assert table.unfit[2048] == "not tried, since length 1024 does not fit"


@pytest.mark.parametrize(
    ("limits", "options", "noted"),
    [
        ((50, 51, 50), {}, True),
        ((50, 52, 50), {}, False),
        ((100, 100, 100), {"max_batch": 40}, False),  # which limits, not memory
        ((100, 0, 0), {}, False),
    ],
)
def test_answers_that_are_alike_are_noted(limits, options, noted):
    notes = table_of(Limited(*limits), resolution=0, **options).notes
    assert (
        notes
        == ("all values of length have the same batch size: does the step use length?",) * noted
    )


def test_an_error_of_a_later_row_carries_the_table():
    with pytest.raises(UnreliableError, match=r"^length=1024: .*no") as caught:
        table_of(Limited(64, UnreliableError("no"), 16))
    assert caught.value.table.batch_sizes() == {512: 64}
    with pytest.raises(KeyboardInterrupt) as interrupted:
        table_of(Limited(64, KeyboardInterrupt(), 16))
    assert interrupted.value.__notes__[0].startswith("the rows that were finished:\n")
    with pytest.raises(UnreliableError) as caught:
        table_of(Limited(UnreliableError("no"), 32, 16))
    assert caught.value.table is None


def test_time_that_is_over_leaves_the_rows_before():
    table = table_of(Limited(64, TimeLimitError("over"), 16))
    assert table.batch_sizes() == {512: 64}
    assert table.notes[0].startswith(
        "time limit: there are no rows for length 1024, 2048. Allow more time"
    )
    with pytest.raises(TimeLimitError, match=r"^length=512: .*over"):
        table_of(Limited(TimeLimitError("over"), 32, 16))
