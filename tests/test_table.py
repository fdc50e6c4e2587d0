import dataclasses
import re

import pytest
from example_results import EXAMPLES, GIB, MIB, gpu_oom, gpu_trial
from hypothesis import given
from test_result import a_trial, trials

from oomprobe.report.table import trial_line, trials_table
from oomprobe.result import Phase, Trial
from oomprobe.units import parse_bytes
from oomprobe.verdicts import Verdict

PARSE = {"phase": Phase, "verdict": Verdict, "steps": int, "batch": int, "samples/s": float}


def seconds(cell):
    units = {"ms": 1e-3, "s": 1, "min": 60}
    numbers = cell.split()
    return sum(float(n) * units[unit] for n, unit in zip(numbers[::2], numbers[1::2], strict=True))


def parse(table):
    """Read a table back: rows of cells by heading, and the remarks under each."""
    title, heading, *lines = table.splitlines()
    unit = re.search(r"memory in (\w+)", title)[1]
    heads, rows = re.split(r"\s{2,}", heading.strip()), []
    for line in lines:
        if line.lstrip().startswith("^"):
            rows[-1]["remark"] = line.strip(" ^")
            continue
        cells = dict(zip(heads, re.split(r"\s{2,}", line.strip()), strict=True))
        rows.append({head: None if cell == "-" else cell for head, cell in cells.items()})
    return unit, rows


@pytest.mark.parametrize("trials", [example().trials for example in EXAMPLES.values()], ids=EXAMPLES)
def test_the_table_adds_up(trials):
    unit, rows = parse(trials_table(trials))
    assert len(rows) == len(trials)
    for row, trial in zip(rows, trials, strict=True):
        assert int(row["batch"]) == trial.batch_size
        assert (row["phase"], row["verdict"], int(row["steps"])) == (trial.phase, trial.verdict, trial.steps)
        for head, size_bytes in (
            ("allocated", trial.peak_allocated_bytes),
            ("reserved", trial.peak_reserved_bytes),
            ("cap", trial.cap_bytes),
        ):
            shown = row.get(head)
            assert (shown is None) == (size_bytes is None)
            if shown is not None:
                assert float(shown) == pytest.approx(size_bytes / parse_bytes(f"1{unit}"), abs=0.0051)
        for head, value, read in (("time/step", trial.step_s, seconds), ("samples/s", trial.samples_per_s, float)):
            shown = row.get(head)
            assert (shown is None) == (value is None)
            if shown is not None:
                assert read(shown) == pytest.approx(value, rel=0.006)


@pytest.mark.parametrize(
    ("head", "measured"),
    [
        ("allocated", {"peak_allocated_bytes": 0}),
        ("reserved", {"peak_reserved_bytes": 0}),
        ("cap", {"cap_bytes": 0}),
        ("time/step", {"step_s": 0.0}),
        ("samples/s", {"samples_per_s": 0.0}),
        ("step name", {"step_name": "x"}),
    ],
)
def test_a_column_is_there_where_one_trial_measured_it(head, measured):
    _, (row, other) = parse(trials_table([a_trial(**measured), a_trial()]))
    assert set(row) - {"remark"} == {"batch", "phase", "verdict", "steps", head}
    assert row[head] is not None
    assert other[head] is None


def test_the_largest_number_chooses_the_unit_of_the_table():
    for largest, unit in ((1023, "B"), (1024, "KiB"), (3 * GIB, "GiB")):
        assert parse(trials_table([a_trial(peak_allocated_bytes=1), a_trial(cap_bytes=largest)]))[0] == unit


def test_a_leak_shows_before_a_long_error():
    leaking = dataclasses.replace(gpu_oom(4), error="x" * 500, leaked_bytes=5 * MIB)
    _, rows = parse(trials_table([leaking, leaking]))
    assert rows[0]["remark"].startswith("LEAKED 5.00 MiB; backward, model.py:142: xxx")
    assert rows[0]["remark"].endswith("...")
    assert rows[1]["remark"] == "LEAKED 5.00 MiB"


def test_each_kind_of_error_is_shown_once():
    other = dataclasses.replace(gpu_oom(3), where="optimizer step")
    _, rows = parse(trials_table([gpu_oom(4), gpu_oom(3), gpu_trial(1), gpu_oom(2), other, gpu_oom(2)]))
    assert ["remark" in row for row in rows] == [True, False, False, False, False, False]
    assert rows[0]["remark"] == "backward, model.py:142: CUDA out of memory. Tried to allocate 2.00 GiB"


def test_all_columns_fit_in_100_and_the_step_name_gives_way():
    full = dataclasses.replace(gpu_oom(10**5, cap=24 * GIB), step_name="n" * 40, step_s=1.0, samples_per_s=9.0)
    lines = trials_table([full]).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[2].rstrip().endswith("nnn...")


def test_one_trial_is_one_line():
    assert trial_line(gpu_oom(64, Phase.BISECT, 20 * GIB)) == (
        "batch 64  out of memory  bisect  peak 19.90 GiB  cap 20.00 GiB  backward, model.py:142: CUDA out..."
    )
    assert trial_line(gpu_trial(64)) == "batch 64  fits  grow  peak 13.77 GiB  941 samples/s"
    assert trial_line(a_trial(3, step_name="eval", leaked_bytes=MIB, accumulation_steps=4)) == (
        "batch 3  fits  grow  eval  LEAKED 1.00 MiB  4 accumulation steps"
    )


@given(trials)
def test_any_trial_is_one_line_and_one_row(trial):
    line = trial_line(trial)
    assert len(line) <= 100
    assert line.isascii()
    assert line.isprintable()
    table = trials_table([trial, trial])
    assert len([line for line in table.splitlines()[2:] if not line.lstrip().startswith("^")]) == 2
    assert table.isascii()


def test_a_trial_has_no_field_that_the_table_forgets():
    """Every field of `Trial` changes the table: a new field needs a column, a remark, or a line here."""
    plain = a_trial()
    changed = {
        "batch_size": 2, "verdict": Verdict.BUG, "phase": Phase.CONFIRM, "steps": 9, "cap_bytes": 1,
        "peak_allocated_bytes": 1, "peak_reserved_bytes": 1, "step_s": 1.0, "samples_per_s": 1.0,
        "alloc_retries": 1, "leaked_bytes": 1, "error": "x", "where": "x", "step_name": "x",
        "accumulation_steps": 2, "replayed": True,
    }  # fmt: skip
    told_elsewhere = {"peak_upper_bytes", "step_leaked_bytes"}  # among the notes
    assert set(changed) == {field.name for field in dataclasses.fields(Trial)} - told_elsewhere
    for name, value in changed.items():
        assert trials_table([dataclasses.replace(plain, **{name: value})]) != trials_table([plain])


def test_one_line_of_an_error_and_no_trial_at_all():
    hung = a_trial(verdict=Verdict.TIMED_OUT, error="it timed out\nthe end of its stderr:\nmuch", where="train.py:12")
    assert trials_table([hung]).endswith("^ train.py:12: it timed out")
    assert trials_table([]) == "no trial was run"
