import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import a_result, a_trial
from hypothesis import given
from strategies import results

from oomprobe.errors import InvalidArgumentError
from oomprobe.records.trials import Phase, Verdict
from oomprobe.results.result import SCHEMA_VERSION, ProbeResult

VERSION_1 = Path(__file__).parent / "data" / "result_version_1.json"


@given(results)
def test_a_result_survives_json(result):
    read = ProbeResult.from_dict(json.loads(result.to_json()))
    assert read == result
    assert all(type(t.verdict) is Verdict and type(t.phase) is Phase for t in read.trials)


def test_a_result_of_version_1_is_read():
    written = json.loads(VERSION_1.read_text())
    read = ProbeResult.from_dict(written).to_dict()
    later = {
        "breakdown": None,
        "epoch": None,
        "unit": "samples",
        "explanation": None,
        "world_size": 1,
        "limiting_rank": None,
        "note_kinds": {},
        "noted_sizes": [],
        "written": "",
    }
    assert {name: read.pop(name) for name in later} == later
    later = {
        "ranks": [],
        **dict.fromkeys(("limiting_rank", "settled_after", "pinned_bytes", "host_bytes")),
    }
    assert all({name: trial.pop(name) for name in later} == later for trial in read["trials"])
    for values, kept in [(read, written), *zip(read["trials"], written["trials"], strict=True)]:
        assert {
            key: value for key, value in values.items() if key != "trials"
        }.items() <= kept.items()


def test_a_summary_is_flat_and_has_what_was_measured():
    trials = (
        a_trial(4, samples_per_s=9.0),
        a_trial(4, phase=Phase.CONFIRM, step_s=0.5, samples_per_s=8.0),
    )
    plan = a_trial(4, accumulation_steps=2, samples_per_s=1.0)
    told = a_result(
        trials=(*trials, plan),
        notes=("a", "b"),
        environment={"torch": "2.14", "allocator_settings": {"x": "y"}},
        options={"memory_fraction": 0.9, "max_batch": None},
    ).summary()
    expected = {"batch_size": 4, "limited_by": "memory", "contaminated": False, "limiting_step": None, "notes": "a\nb",
                "samples_per_s": 8.0, "step_s": 0.5, "environment/torch": "2.14", "options/memory_fraction": 0.9,
                "options/max_batch": None}  # fmt: skip
    assert expected.items() <= told.items()
    assert not {"trials", "fit", "environment", "environment/allocator_settings"} & told.keys()


@given(results)
def test_any_result_has_a_summary_and_a_repr_in_one_line(result):
    assert all(
        value is None or isinstance(value, bool | int | float | str)
        for value in result.summary().values()
    )
    assert repr(result).startswith(f"<ProbeResult: batch {result.batch_size} ")
    assert "\n" not in repr(result)


def test_to_json_writes_what_it_returns(tmp_path):
    path = tmp_path / "result.json"
    text = a_result(notes=("gr\u00f6\u00dfer",), options={"somewhere": tmp_path}).to_json(path)
    assert path.read_text(encoding="utf-8") == text
    read = ProbeResult.from_dict(json.loads(text))
    assert (read.notes, read.options) == (("gr\u00f6\u00dfer",), {"somewhere": str(tmp_path)})


@pytest.mark.parametrize("version", [0, 2, None])
def test_another_schema_version_is_refused_by_number(version):
    data = {**a_result().to_dict(), "schema_version": version}
    with pytest.raises(
        InvalidArgumentError,
        match=f"schema_version {version!r}; this oomprobe reads {SCHEMA_VERSION}",
    ):
        ProbeResult.from_dict(data)


@pytest.mark.parametrize(
    "data", [None, 3, "text", [1], {}, {"schema_version": 1, "batch_size": 4, "trials": 3}]
)
def test_arbitrary_json_is_an_invalid_argument(data):
    with pytest.raises(InvalidArgumentError):
        ProbeResult.from_dict(data)


@pytest.mark.parametrize("name", ["schema_version", "batch_size", "trials"])
def test_a_missing_key_is_named(name):
    data = a_result().to_dict()
    del data[name]
    with pytest.raises(InvalidArgumentError, match=name):
        ProbeResult.from_dict(data)


def test_keys_of_a_newer_oomprobe_are_ignored():
    data = a_result().to_dict()
    for part in (data, data["trials"][0], data["fit"]):
        part["invented_later"] = {"a": 1}
    assert ProbeResult.from_dict(data) == a_result()


def test_a_plan_says_what_ran_and_stays_below_what_failed():
    failed = a_trial(6, Verdict.OOM, accumulation_steps=2)
    trials = (a_trial(6), a_trial(5, Verdict.OOM), a_trial(4, accumulation_steps=3))
    ran = {n: a_result(batch_size=6, trials=trials).plan(n)[0] for n in (6, 5, 4)}
    assert [(e.ran, e.ran_accumulated) for e in ran.values()] == [
        (True, False),
        (False, False),
        (True, True),
    ]
    assert (
        max(
            entry.micro_batch for entry in a_result(batch_size=6, trials=(failed, *trials)).plan(12)
        )
        == 4
    )


def test_a_plan_respects_the_answer_and_the_options():
    result = a_result(batch_size=96, options={"multiple_of": 32})
    first = result.plan(512, world_size=2)[0]
    assert (first.micro_batch, first.exact) == (64, True)
    assert all(e.micro_batch % 32 == 0 and e.micro_batch <= 96 for e in result.plan(1000))
    result = a_result(batch_size=4, world_size=8)
    assert result.plan(64)[0].world_size == 8
    assert result.plan(64, world_size=2)[0].world_size == 2
    result = a_result(batch_size=50, trials=())
    assert result.plan(51)[0].micro_batch == 25
    assert replace(result, options={"min_batch": 48}).plan(51)[0].micro_batch == 50
