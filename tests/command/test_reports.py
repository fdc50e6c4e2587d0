"""What follows from the reports of all processes together."""

import json
from dataclasses import asdict, replace

import pytest

from oomprobe.records.trials import Verdict
from oomprobe.runners.command.reports import (
    Memory,
    ProcessReport,
    RunReports,
    are_the_same,
    limiting_rank,
)
from oomprobe.tape.record import NotRecorded
from oomprobe.verdicts import Link

GIB = 2**30


def memory(uuid="a", *, reserved=2, peak=4, outside=1, fraction=0.9, requested=(), total=10):
    return Memory(
        index=0, uuid=uuid, name="Card", total_bytes=total * GIB, reserved_bytes=reserved * GIB,
        peak_reserved_bytes=peak * GIB, peak_allocated_bytes=peak * GIB, retries=0,
        requested=requested, fraction=fraction, outside_bytes=outside and outside * GIB,
    )  # fmt: skip


def report(
    rank=None, *devices, steps=3, world=None, why="step", begun_s=0.0, at_s=10.0, host="node"
):
    return ProcessReport(
        pid=1, host=host, rank=rank, world_size=world, program="train.py", why=why, begun_s=begun_s,
        at_s=at_s, torch="2.14.1", cuda="13.0", steps=steps, step_s=(1.0, 2.0), ooms=0, raised_ooms=0,
        where=None, errors=(), devices=devices,
    )  # fmt: skip


ENGINE = report(None, memory("b"), steps=0)  # beside the trainer; it never steps


@pytest.mark.parametrize(
    ("reports", "all_report", "steps_of_all", "missing"),
    [
        ([], False, 0, 1),
        ([report(steps=0)], False, 0, 1),  # a launcher that imports torch
        ([report(steps=0), report(0, memory(), steps=0)], True, 0, 0),
        ([report()], True, 3, 1),  # it trains on what torch does not count
        ([report(), ENGINE], True, 3, 1),
        (
            [report(0, memory(), world=2)],
            False,
            0,
            1,
        ),  # the other rank is on another machine, or has not stepped yet
        ([report(0, memory(), world=2), report(1, steps=0)], False, 0, 0),
        ([report(0, memory(), world=2), report(1, memory("b"), steps=2)], True, 2, 0),
    ],
)
def test_what_is_known_of_all_processes(reports, all_report, steps_of_all, missing):
    seen = RunReports(reports)
    assert (seen.all_report, seen.steps_of_all) == (all_report, steps_of_all)
    assert seen.missing_ranks == missing


@pytest.mark.parametrize(
    ("reports", "users"),
    [
        # Ranks that see one device each all call it 0; its UUID and machine tell them apart.
        ([report(0, memory("a")), report(1, memory("b")), report(2, memory("a"), host="other")], [1, 1, 1]),
        # A process that ended before training began, such as a check.
        ([report(None, memory(), why="exit", at_s=5.0), report(0, memory(), begun_s=6.0)], [1]),
        ([report(None, memory(), why="exit", at_s=5.0), report(0, memory(), begun_s=4.0)], [2]),
    ],
)  # fmt: skip
def test_which_processes_use_a_card(reports, users):
    assert [len(card.users) for card in RunReports(reports).cards] == users


PLAIN = report(0, memory())
RAN_OUT = replace(PLAIN, raised_ooms=1)
BROKE = replace(PLAIN, errors=(Link(classes=("builtins.KeyError",), text="a"),))


@pytest.mark.parametrize(
    ("one", "met"),
    [
        (PLAIN, ["may_recover"]),
        (replace(PLAIN, ooms=1), ["is_pressed", "may_recover"]),
        (report(0, replace(memory(), retries=1)), ["is_pressed", "may_recover"]),
        (RAN_OUT, ["caught_oom", "goes_on", "is_in_trouble"]),
        (replace(RAN_OUT, why="exit"), ["caught_oom", "is_in_trouble"]),
        (replace(RAN_OUT, devices=()), ["caught_oom", "goes_on"]),
        (BROKE, ["is_in_trouble"]),
        (replace(BROKE, devices=()), []),
    ],
)
def test_what_an_allocator_has_met(one, met):
    seen = RunReports([ENGINE, one])
    names = ("is_pressed", "caught_oom", "may_recover", "goes_on", "is_in_trouble")
    assert [name for name in names if getattr(seen, name)] == met


def test_what_the_command_says_and_takes_in_all():
    one = replace(PLAIN, step_s=(1.0, 9.0), pinned_bytes=3, host_bytes=5, refusal="no")
    other = replace(report(1, memory("b", peak=6, outside=0)), steps=5, step_s=(1.0, 13.0))
    silent = replace(ENGINE, pinned_bytes=100, read_at="x.py:1")
    seen = RunReports([silent, one, replace(other, pinned_bytes=4, refusal="nor")])
    assert (seen.steps, seen.step_s, seen.pinned_bytes, seen.host_bytes) == (3, 4.0, 7, 5)
    assert (seen.refusal, seen.read_at) == ("no", "")
    assert RunReports([replace(BROKE, read_at="y.py:2")]).read_at == "y.py:2"
    assert RunReports([replace(one, steps=1)]).step_s is RunReports([]).step_s is None
    assert RunReports([]).fullest_card.users == ()
    assert seen.fullest_card.peak_reserved_bytes == 10 * GIB  # of 10, and that of `one` 4 of 9
    crowded = replace(one, devices=(replace(memory(outside=7), workspace_bytes=2),))
    assert RunReports([crowded, other]).fullest_card.workspaces_bytes == 2  # it has 4 of 3 GiB


RANKS = [report(0, memory("a"), host="node0"), report(1, memory("b"), host="node1")]
FAULT = replace(RANKS[1], errors=(Link(classes=("builtins.ValueError",), text="wrong"),))


@pytest.mark.parametrize(
    ("reports", "passed", "expected", "limiting"),
    [
        (RANKS[::-1], True, [(0, Verdict.FITS), (1, Verdict.FITS)], 0),
        ([RANKS[0], report(1, memory("b", peak=5))], True, [(0, Verdict.FITS), (1, Verdict.FITS)], 1),
        ([RANKS[0], FAULT], False, [(0, None), (1, Verdict.BUG)], None),
        ([RANKS[0], replace(FAULT, raised_ooms=1)], False, [(0, None), (1, Verdict.OOM)], 1),
        ([RANKS[0], ENGINE], True, [], None),  # a single one has no record of its own
    ],
)  # fmt: skip
def test_each_of_several_ranks_has_a_record(reports, passed, expected, limiting):
    ranks = RunReports(reports).ranks(passed=passed)
    assert [(rank.rank, rank.verdict) for rank in ranks] == expected
    assert limiting_rank(ranks) == limiting


TAPE = {
    "unrecorded": "",
    "entries": [{"action": "alloc", "addr": 512, "size": 100, "stream": 0, "pool_id": [0, 0]}],
    "ends": [[1, 0]],
    "may_retry": False,
    "settings": {},
    "processors": [[9, 0], 132, 2048],
}


@pytest.mark.parametrize(
    ("reports", "tapes", "said"),
    [
        (RANKS[::-1], [TAPE, TAPE], None),
        (RANKS, [TAPE], "the command recorded nothing"),
        ([], [], "the command recorded nothing"),
        ([report(0, memory("a"), memory("b"), host="node0")], [TAPE], "one GPU for each process"),
        ([RANKS[0], replace(RANKS[1], host="node0", devices=RANKS[0].devices)], [TAPE], "one GPU"),
        (RANKS[:1], [{"unrecorded": "the command records it"}], "^the command records it$"),
        (RANKS[:1], [{**TAPE, "ends": [[2, 0]]}], "lacks a part"),
        (RANKS[:1], [{**TAPE, "settings": {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}}], "x"),
    ],
)
def test_what_processes_have_recorded(tmp_path, reports, tapes, said):
    for number, tape in enumerate(tapes):
        (tmp_path / f"node{number}-1.tape").write_text(json.dumps(tape))
    if said is not None:
        with pytest.raises(NotRecorded, match=said):
            RunReports(reports).tapes(tmp_path)
        return
    for taped in RunReports(reports).tapes(tmp_path):
        assert [call.sizes for call in taped.calls] == [(100,)]
        assert taped.replay(taped.calls, 2**20, 0).error
        assert taped.replay(taped.calls, 2**21, 0).peak_reserved_bytes == 2**21


@pytest.mark.parametrize(
    ("reports", "outside", "available"),
    [
        # Each of two processes on a card counts the other's memory as outside of its own.
        ([report(0, memory(reserved=2, outside=4)), report(1, memory(reserved=3, outside=3))], 1 * GIB, 9 * GIB),
        ([report(0, memory(outside=None))], None, 10 * GIB),
    ],
)  # fmt: skip
def test_the_memory_that_a_command_leaves(reports, outside, available):
    (card,) = RunReports(reports).cards
    assert (card.outside_bytes, card.available_bytes) == (outside, available)
    assert RunReports(reports).outside_bytes == outside


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([report(0, memory("a"))], None),
        ([report(0, memory("b", fraction=0.5)), report(1, memory("a"))], None),
        (
            [report(0, memory("b", fraction=0.9))],
            "rank 0 set its allocator's cap to 0.9",
        ),  # 0.5 is wanted there
        ([report(0, memory("a", fraction=2.0**34))], "rank 0 set its allocator's cap"),
        ([report(0, memory("a", fraction=None))], "rank 0 did not report the cap"),
        ([report(0, memory("a", peak=10))], "rank 0 reserved more than its cap before its first step ended"),
        ([report(0, memory("a")), report(1, memory("a"))], "rank 0 and rank 1 hold memory of one GPU, Card"),
        ([report(None)], "no process of the command reported its GPU's memory"),
    ],
)  # fmt: skip
def test_whether_all_were_held_to_their_caps(reports, said):
    found = RunReports(reports).uncapped({"": 0.9, "b": 0.5})
    assert found is None if said is None else found.startswith(said)


def test_what_each_step_requested():
    def requested(*steps):
        silent = report(1, memory("b", requested=((0, 0),) * 3))  # its allocator counts nothing
        return RunReports([report(0, memory(requested=steps)), silent]).requested

    steps = requested((100, 5), (150, 8), (190, 12))
    assert steps == {"0 a": [(50, 3), (40, 4)]}
    assert are_the_same(steps, requested((90, 4), (140, 7)))  # in the step that both have made
    assert not are_the_same(steps, requested((100, 5), (151, 8)))
    assert not are_the_same(requested(), requested())


def test_reports_are_read_in_the_order_they_were_written(tmp_path):
    link = Link(classes=("builtins.KeyError",), text="a")
    written = [
        replace(report(number, memory()), at_s=at_s, errors=(link,))
        for number, at_s in enumerate((3.0, 1.0))
    ]
    for one in written:
        (tmp_path / f"node-{one.rank}.json").write_text(
            json.dumps({**asdict(one), "newer": "field"})
        )
    (tmp_path / "node-9.json.part").write_text("{")
    assert RunReports.read(tmp_path).reports == written[::-1]
