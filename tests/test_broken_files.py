"""Files with one wrong value, through every door: each ends in an answer or in a sentence, never in an internal error."""

import copy
import json
import math
import pickle
import random
import re
from itertools import starmap

import pytest
from example_results import gpu, ranks
from helpers import a_result, page_of

from oomprobe.cli import main
from oomprobe.errors import InvalidArgumentError
from oomprobe.explaining import PeakMonitor
from oomprobe.records.breakdown import KINDS, Breakdown, ModuleMemory
from oomprobe.records.epoch import Curve, EpochRecord
from oomprobe.records.savings import Comparison
from oomprobe.records.timeline import Timeline
from oomprobe.results.result import ProbeResult
from oomprobe.results.table import ProbeTable, read_result

WRONG = [
    None, "", "x", True, False, -1, 0, 1, 0.5, 2**40, 2**61, 2**63, 10**25, 10**400, 1e308, -1e308, math.nan, math.inf,
    -math.inf, [], {}, [[[[1]]]], {"a": {"b": [1]}}, "long " * 20_000, "x" * 100_000, "a\nb\r\x07",
    "\x1b[31mred\x1b]0;title\x07", "\u202eright to left\u2066", "\ud800", "$\\frac{1$", "1e400",
]  # fmt: skip
SAMPLE = 40
HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def results():
    """Return a result and tables with as many kinds of fields as there are, as JSON has them."""
    parts = dict.fromkeys(KINDS, 2**20)
    modules = (ModuleMemory(name="layers.*", kind="Block", count=3, activation_bytes=2**19),)
    held = Breakdown(
        batch_size=98, peak_allocated_bytes=2**22, peak_reserved_bytes=2**23, parts=parts,
        peak_in="backward", step_name="train", modules=modules,
        timeline=Timeline(events=(0, 9), live_bytes={"a": (1, 2), "b": (0, 2**20)}),
    )  # fmt: skip
    curves = Curve(calls=(1, 4), reserved_bytes=(2**20, 2**21)), Curve.of([2**22])
    epoch = EpochRecord(
        batch_size=98, ends=(None, None), deaths=0, reserved=curves, longest_only_batch_size=104,
        longest_only_ends=(None, 2), longest_only_reserved=curves,
    )  # fmt: skip
    written = json.loads(a_result(breakdown=held, epoch=epoch).to_json())
    full = gpu().to_dict() | {name: written[name] for name in ("breakdown", "epoch")}
    full["trials"] = full["trials"][7:]
    full["environment"] = {"command": "train", "program": "train.py", "torch": "2.14", "model": "Gpt", "after": "it",
                           "allocator_settings": {"expandable_segments": "True"}, "isolated": True, "world_size": 2}  # fmt: skip
    full["note_kinds"] = {full["notes"][0]: "warning"}
    full["options"] |= {"min_batch": 1, "multiple_of": 2, "over": {"length": [1, 2]}}
    of_ranks = ranks().to_dict()
    of_ranks["trials"] = of_ranks["trials"][-3:]
    yield "result", full
    yield "ranks", of_ranks
    result = ProbeResult.from_dict(of_ranks)
    yield "table", ProbeTable(
        axis="length", rows={512: result, 1024: result, 2048: None},
        unfit={2048: "no"}, notes=("a note",), elapsed_s=3.0,
    ).to_dict()  # fmt: skip
    yield (
        "cards",
        ProbeTable(axis="device", rows={"sim:T4": result, "b": None}, required=8).to_dict(),
    )
    compared = Comparison(
        batch_size=39, required=True, typed={"checkpoint": "type this"}, recomputed={"checkpoint": 0.3},
        not_run={"bf16_autocast": "on already"},
    )  # fmt: skip
    rows = {"as is": result, "checkpoint": ProbeResult.from_dict(full)}
    yield "savings", json.loads(ProbeTable(axis="saving", rows=rows, savings=compared).to_json())


def a_snapshot():
    """Return a snapshot with a refused request and stacks."""
    frame = {"name": "forward", "filename": "/me/model.py", "line": 7}
    events = [
        {"action": "segment_alloc", "addr": 0, "size": 2**21, "stream": 0, "frames": []},
        {"action": "alloc", "addr": 0, "size": 512, "stream": 0, "frames": [frame, frame]},
        {"action": "oom", "device_free": 2**20, "size": 2**30, "stream": 0, "frames": [frame]},
    ]
    block = {"size": 512, "requested_size": 500, "state": "active_allocated", "frames": [frame]}
    rest = {"size": 2**21 - 512, "requested_size": 0, "state": "inactive", "frames": []}
    segment = {"device": 0, "address": 0, "total_size": 2**21, "stream": 0, "segment_pool_id": [0, 0],
               "is_expandable": False, "blocks": [block, rest]}  # fmt: skip
    settings = {"max_split_size": -1, "roundup_power2_divisions": {"1": 0}}
    return {"device_traces": [events], "segments": [segment], "allocator_settings": settings}


def places(data, place=()):
    """Yield the places of values; in lists, of the first and the last item."""
    if place:
        yield place
    if isinstance(data, dict):
        for name, value in data.items():
            yield from places(value, (*place, name))
    elif isinstance(data, list) and data:
        for at in sorted({0, len(data) - 1}):
            yield from places(data[at], (*place, at))


def faults():
    """Yield a kind of file, its data, a place there and the number of a wrong value for it."""
    for kind, whole in (*results(), ("snapshot", a_snapshot())):
        for place in places(whole):
            yield from ((kind, whole, place, number) for number in range(len(WRONG)))


def broken(kind, whole, place, number):
    """Return a name, the kind of file and its data with the wrong value."""
    data = copy.deepcopy(whole)
    part = data
    for step in place[:-1]:
        part = part[step]
    part[place[-1]] = WRONG[number]
    return f"{kind} {place} {number}", kind, data


def said_by(words, capsys):
    """Return the exit status of a command and all that it wrote."""
    status = main(words)
    written = capsys.readouterr()
    return status, written.out + written.err


def through_each_door(name, kind, data, tmp_path, capsys):
    """Return what went wrong with a file, an empty text if nothing."""
    path, good = tmp_path / "broken", tmp_path / "good.json"
    if kind == "snapshot":
        path.write_bytes(pickle.dumps(data, protocol=4))
        doors = {"explain": (["explain", str(path)], (0, 2))}
    else:
        path.write_text(json.dumps(data))
        a_result(environment={"model": "Gpt"}).to_json(good)
        doors = {
            "show": (["show", str(path), "--verbose"], (0, 2)),
            "compare": (["compare", str(path), str(good), "--tolerance", "1%"], (0, 2, 5)),
            "compared": (["compare", str(good), str(path), "--tolerance", "1%"], (0, 2, 5)),
        }
    for door, (words, allowed) in doors.items():
        status, said = said_by(words, capsys)
        if status not in allowed:
            return f"{door} of {name} ends with {status}: {said.splitlines()[-2:]}"
        if HIDDEN.search(said) or (status != 2 and re.search(r"\bnan\b", said)):
            return f"{door} of {name} shows what it must not"
        if status == 2 and door in ("show", "explain") and str(path) not in said:
            return f"{door} of {name} does not name the file: {said}"
    if kind == "snapshot":
        return ""
    try:
        PeakMonitor(path, 8)
    except InvalidArgumentError:
        pass
    except Exception as error:
        return f"PeakMonitor of {name}: {error!r}"
    try:
        text = page_of(read_result(path))
    except InvalidArgumentError:
        return ""
    except Exception as error:
        return f"page of {name}: {error!r}"
    if HIDDEN.search(text) or re.search(r">nan\b", text):
        return f"page of {name} shows what it must not"
    return ""


@pytest.mark.parametrize("share", [SAMPLE, pytest.param(1000, marks=pytest.mark.slow)])
def test_one_wrong_value_ends_in_an_answer_or_a_sentence(share, tmp_path, capsys):
    sample = random.Random(11).sample([*faults()], share)
    assert len({kind for kind, *_ in sample}) == 6
    files = starmap(broken, sample)
    failed = [through_each_door(*file, tmp_path, capsys) for file in files]
    assert [*filter(None, failed)] == []
