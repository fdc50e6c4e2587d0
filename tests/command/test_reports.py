"""What follows from the reports of all processes together."""

import json

import pytest

from oomprobe.runners.command import reports
from oomprobe.runners.command.reports import Memory, Report

GIB = 2**30


def memory(uuid="a", *, reserved=2, peak=4, outside=1, fraction=0.9, asked=(), total=10):
    return Memory(
        index=0,
        uuid=uuid,
        name="Card",
        total_bytes=total * GIB,
        reserved_bytes=reserved * GIB,
        peak_reserved_bytes=peak * GIB,
        peak_allocated_bytes=peak * GIB,
        retries=0,
        asked=asked,
        fraction=fraction,
        outside_bytes=None if outside is None else outside * GIB,
    )


def report(rank=None, *devices, steps=3, world=None, why="step", begun_s=0.0, at_s=10.0, host="node", pid=1):
    return Report(
        pid=pid,
        host=host,
        rank=rank,
        world_size=world,
        program="train.py",
        why=why,
        begun_s=begun_s,
        at_s=at_s,
        torch="2.14.1",
        cuda="13.0",
        steps=steps,
        step_s=(1.0, 2.0),
        ooms=0,
        raised_ooms=0,
        where=None,
        errors=(),
        devices=devices,
    )


@pytest.mark.parametrize(
    ("seen", "all_"),
    [
        ([], False),
        ([report(steps=0)], False),  # a launcher that imports torch
        ([report(steps=0), report(0, memory(), steps=0)], True),
        ([report()], True),  # it trains on what torch does not count
        ([report(0, memory(), world=2)], False),
        ([report(0, memory(), world=2), report(1, memory("b"))], True),
    ],
)
def test_whether_all_processes_with_memory_report(seen, all_):
    assert reports.all_report(seen) is all_


@pytest.mark.parametrize(
    ("seen", "steps"),
    [
        ([], 0),
        ([report(steps=0)], 0),
        ([report(), report(steps=0)], 3),  # an engine beside the trainer, which never steps
        ([report(0, world=2), report(1, world=2, steps=2)], 2),
        ([report(0, world=2)], 0),  # the other rank is on another machine, or has not stepped yet
    ],
)
def test_every_rank_must_have_stepped(seen, steps):
    assert reports.least_steps(seen) == steps


def test_ranks_that_see_one_device_each_are_told_apart_by_uuid():
    seen = [report(0, memory("a")), report(1, memory("b")), report(2, memory("a"), host="other")]
    assert [len(card) for card in reports.cards(seen)] == [1, 1, 1]


def test_what_two_processes_on_a_card_leave():
    """Each counts the other's memory as outside of its own."""
    (card,) = reports.cards([report(0, memory(reserved=2, outside=4)), report(1, memory(reserved=3, outside=3))])
    assert reports.outside_bytes(card) == 1 * GIB
    assert reports.available_bytes(card) == 9 * GIB


def test_a_process_that_ended_before_training_began_is_left_out():
    check = report(None, memory(), why="exit", at_s=5.0)
    assert [len(card) for card in reports.cards([check, report(0, memory(), begun_s=6.0)])] == [1]
    assert [len(card) for card in reports.cards([check, report(0, memory(), begun_s=4.0)])] == [2]


def test_a_device_that_could_not_be_measured():
    (card,) = reports.cards([report(0, memory(outside=None))])
    assert reports.outside_bytes(card) is None
    assert reports.available_bytes(card) == 10 * GIB


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ([report(0, memory("a"))], None),
        ([report(0, memory("a", fraction=0.8))], None),
        ([report(0, memory("b", fraction=0.5)), report(1, memory("a"))], None),
        ([report(0, memory("b", fraction=0.9))], "rank 0 set its allocator's cap to 0.9"),  # 0.5 is wanted there
        ([report(0, memory("a", fraction=2.0**34))], "rank 0 set its allocator's cap"),
        ([report(0, memory("a", fraction=None))], "rank 0 did not report the cap"),
        ([report(0, memory("a", peak=10))], "rank 0 reserved more than its cap before its first step ended"),
        ([report(0, memory("a")), report(1, memory("a"))], "rank 0 and rank 1 hold memory of one GPU, Card"),
        ([report(None)], "no process of the command reported its GPU's memory"),
        ([], "no process of the command reported its GPU's memory"),
    ],
)
def test_whether_all_were_held_to_their_caps(seen, said):
    found = reports.uncapped(seen, {"": 0.9, "b": 0.5})
    assert found is None if said is None else found.startswith(said)


def test_what_each_step_asked_for():
    def asked(*steps):
        return reports.asked_by_step([report(0, memory(asked=steps)), report(1, memory("b", asked=((0, 0),) * 3))])

    steps = asked((100, 5), (150, 8), (190, 12))
    assert steps == {"0 a": [(50, 3), (40, 4)]}  # the other one's allocator counts nothing
    assert reports.are_the_same(steps, asked((90, 4), (140, 7)))  # in the step that both have made
    assert not reports.are_the_same(steps, asked((100, 5), (151, 8)))
    assert not reports.are_the_same(asked(), asked())


def test_reports_are_read_in_the_order_they_were_written(tmp_path):
    for number, at_s in enumerate((3.0, 1.0, 2.0)):
        written = {**{name: getattr(report(number), name) for name in Report.__slots__}, "at_s": at_s}
        written |= {"errors": [{"classes": ["builtins.KeyError"], "text": "a"}], "devices": [], "newer": "field"}
        (tmp_path / f"node-{number}.json").write_text(json.dumps(written))
    (tmp_path / "node-9.json.part").write_text("{")
    assert [one.at_s for one in reports.read(tmp_path)] == [1.0, 2.0, 3.0]
    assert reports.read(tmp_path)[0].errors[0].classes == ("builtins.KeyError",)
