"""Which savings are searched, and what their table says, on a runner that says what runs with each."""

import json
from contextlib import contextmanager

import pytest
from helpers import ARunner, a_trial, records

from oomprobe.errors import NothingFitsError, StepFailedError, TimeLimitError
from oomprobe.probing.order import Order
from oomprobe.probing.savings import search_savings
from oomprobe.probing.session import Session
from oomprobe.records.options import Options
from oomprobe.records.patience import Clock
from oomprobe.records.trials import Outcome, Verdict
from oomprobe.results.progress import Reporter
from oomprobe.results.table import ProbeTable

BF16, CHECKPOINT, OFFLOAD = "bf16_autocast", "checkpoint", "offload_activations"
SINGLE = [
    "as is",
    BF16,
    "checkpoint_attention_saved",
    CHECKPOINT,
    "fused_optimizer",
    "no_foreach",
    OFFLOAD,
]
BEST, CHEAPEST, OTHER = f"{CHECKPOINT}+{OFFLOAD}", f"{BF16}+{CHECKPOINT}", f"{BF16}+{OFFLOAD}"
LIMITS = {
    "as is": 64,
    BF16: 96,
    CHECKPOINT: 128,
    OFFLOAD: 112,
    BEST: 150,
    CHEAPEST: 256,
    OTHER: 130,
}

TOO_LARGE = NothingFitsError("the model alone")


class Limited(ARunner):
    """A runner whose trials pass up to a limit, or raise one that is an error."""

    def __init__(self, limit, typed, blocks=0):
        super().__init__()
        self.blocks = blocks
        self.limit, self.typed, self.sizes = limit, typed, []

    def run(self, request):
        self.sizes.append(request.batch_size)
        if isinstance(self.limit, Exception):
            raise self.limit
        verdict = Verdict.FITS if request.batch_size <= self.limit else Verdict.OOM
        trial = a_trial(request.batch_size, verdict, request.phase, steps=len(request.calls))
        return Outcome(
            trial=trial,
            records=records(trial.steps),
            typed=self.typed if trial.passed else {},
            blocks=self.blocks,
        )


def search(wanted="all", required=None, limits=LIMITS, acts=True, blocks=0, **options):
    """Return the table, and the session of each row in the order in which they started."""
    order = Order(options=Options(**options), savings=wanted, required=required)
    sessions = {}

    @contextmanager
    def opened(order):
        name = "+".join(order.axis.savings) or "as is"
        assert name not in sessions
        if limits["as is"] is TOO_LARGE:
            raise TOO_LARGE
        runner = Limited(
            limits.get(name, limits["as is"]),
            dict.fromkeys(order.axis.savings, "typed") if acts else {},
            blocks,
        )
        sessions[name] = Session(runner, order.options, Reporter(), Clock(order.options), [])
        yield sessions[name]

    return search_savings(order, opened), sessions


@pytest.mark.parametrize(
    ("required", "pairs", "missing", "note"),
    [
        (None, [BEST], [], []),
        (80, [BEST], [], []),  # three reach it without any pair
        (100, [BEST, CHEAPEST], [], []),
        (128, [BEST, CHEAPEST, OTHER], [], []),
        (200, [BEST, CHEAPEST, OTHER], [OTHER], [f"nor does batch 200 run with {OTHER}, {BEST}"]),
    ],
)
def test_pairs_run_where_they_may_reach_the_required_size(required, pairs, missing, note):
    table, sessions = search(required=required)
    assert [*sessions] == SINGLE + pairs
    assert table.batch_sizes() == {
        name: LIMITS.get(name, 64) for name in sessions if name not in missing
    }
    assert [*table.notes] == note
    assert (table.savings.batch_size, table.savings.required) == (
        required or 64,
        required is not None,
    )
    assert all((required or 64) in session.runner.sizes for session in sessions.values())
    not_run = {*table.savings.not_run} - {"expandable_segments"}  # a process must start with them
    assert all(name.endswith("first or last K of N") for name in not_run)  # no blocks are repeated
    for name in missing:
        assert {*sessions[name].runner.sizes} == {required}


TOTAL = 6


def fewest(running, required=100, wanted=CHECKPOINT):
    """Return the rows where a size runs with a saving on so many of the model's first, and last, blocks."""
    limits = {"as is": 64, wanted: 128 if TOTAL in running else 80}
    for end in ("first", "last"):
        for count in range(1, TOTAL):
            limits[f"{wanted} {end} {count} of {TOTAL}"] = 110 if count in running else 64
    table, sessions = search(wanted, required, limits=limits, blocks=TOTAL)
    rows = [name for name in table.rows if name.startswith(f"{wanted} ")]
    assert {name for name in table.savings.typed if " of " in name} == {*rows}
    assert not [
        name for name in sessions if " of " in name and {*sessions[name].runner.sizes} != {required}
    ]
    return table, rows


@pytest.mark.parametrize("wanted", [CHECKPOINT, OFFLOAD])
@pytest.mark.parametrize(
    "running",
    [
        *(
            {*range(least, TOTAL + 1)} for least in range(1, TOTAL + 1)
        ),  # memory falls with each block
        *({least, *range(least + 2, TOTAL + 1)} for least in range(1, TOTAL)),  # but for one
        set(),
    ],
)
def test_the_fewest_blocks_from_either_end_that_run_the_required_size_are_a_row(running, wanted):
    table, rows = fewest(running, wanted=wanted)
    least = min(running, default=TOTAL)
    expected = [f"{wanted} {end} {least} of {TOTAL}" for end in ("first", "last")]
    assert rows == [name for name in expected if least < TOTAL]
    assert table.cheapest(100) == min(rows + [wanted] * (TOTAL in running), default=None)
    said = [f"batch 100 ran with {name}, and failed with one block fewer" for name in expected]
    assert [note for note in table.notes if "fewer" in note] == (said if running else [])


@pytest.mark.parametrize(("required", "running"), [(None, {*range(1, TOTAL + 1)}), (64, {TOTAL})])
def test_blocks_are_not_counted_without_a_need(required, running):
    assert fewest(running, required)[1] == []


def test_a_model_without_repeated_blocks_has_no_such_row():
    table, _ = search(OFFLOAD, 100)
    assert table.savings.not_run == {f"{OFFLOAD} first or last K of N": "no repeated blocks"}
    assert [*table.rows] == ["as is", OFFLOAD]


def test_memory_is_broken_down_at_the_size_that_is_compared_or_at_the_answer():
    _, sessions = search(f"{BF16},{CHECKPOINT}", 100, breakdown=True)
    assert [session.runner.sizes[-1] for session in sessions.values()] == [64, 96, 100]


def test_a_saving_that_has_nothing_to_act_on_or_fails_is_no_row():
    table, _ = search("checkpoint", acts=False)
    assert table.savings.not_run[CHECKPOINT].startswith("it had nothing to act on")
    table, _ = search(
        "checkpoint", limits={"as is": 64, CHECKPOINT: StepFailedError("a bug\nat its line")}
    )
    assert ([*table.rows], table.savings.not_run) == (["as is"], {CHECKPOINT: "a bug"})
    table, _ = search("checkpoint", limits={"as is": 64, CHECKPOINT: 0})
    assert table.rows[CHECKPOINT] is None
    with pytest.raises(StepFailedError, match="a bug"):
        search("checkpoint", limits={"as is": StepFailedError("a bug")})


def test_the_time_of_all_rows_is_limited_together():
    limits = {**LIMITS, CHECKPOINT: TimeLimitError("over")}
    table, sessions = search(f"{BF16},{CHECKPOINT},{OFFLOAD}", limits=limits, time_limit_s=600)
    assert [*table.rows] == ["as is", BF16]
    assert list(table.notes) == [
        f"time limit: there are no rows for saving {CHECKPOINT}, {OFFLOAD}. Allow more time, or "
        "make another table for them"
    ]
    left_s = [session.options.time_limit_s for session in sessions.values()]
    assert 600 > left_s[0] > left_s[1] > left_s[2] > 500
    with pytest.raises(TimeLimitError):
        search(limits={"as is": TimeLimitError("over")})


def test_savings_run_where_nothing_fits_without():
    table, _ = search("checkpoint", limits={"as is": 8, CHECKPOINT: 40}, min_batch=32)
    assert table.rows["as is"] is None
    assert (table.batch_sizes(), table.savings.batch_size) == ({CHECKPOINT: 40}, 32)
    assert table.at(32)["as is"] is None
    assert table.cheapest(32) == CHECKPOINT
    assert ProbeTable.from_dict(json.loads(table.to_json())) == table
    assert "out of memory" in str(table)
    with pytest.raises(NothingFitsError, match="the model alone"):
        search(limits={"as is": TOO_LARGE})
