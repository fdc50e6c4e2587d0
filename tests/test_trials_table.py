"""The table of trials, and the line for one trial."""

import dataclasses

import pytest
from example_results import GIB, MIB, gpu_oom, gpu_trial
from helpers import a_trial
from hypothesis import given
from strategies import trials

from oomprobe.records.trials import Phase, Trial, Verdict
from oomprobe.results.trials import trial_line, trials_block, trials_table


def remarks(*some):
    """Return the remarks below the rows by row number."""
    found, row = {}, -1
    for line in trials_table(some).splitlines()[2:]:
        if line.lstrip().startswith("^"):
            found[row] = line.strip(" ^")
        else:
            row += 1
    return found


@pytest.mark.parametrize(
    ("head", "measured", "shown"),
    [
        ("cap", {"cap_bytes": 0}, "0"),
        ("time/step", {"step_s": 0.0}, "0 ms"),
        ("samples/s", {"samples_per_s": 0.0}, "0"),
        ("step name", {"step_name": "x"}, "x"),
    ],
)
def test_a_column_is_shown_if_one_trial_measured_it(head, measured, shown):
    _, heads, row, other = trials_table([a_trial(**measured), a_trial()]).splitlines()
    assert heads.split() == ["batch", "phase", "verdict", "steps", *head.split()]
    assert row.endswith(f"  {shown}")
    assert other.endswith("  -")


def test_the_largest_number_determines_the_unit():
    for largest, unit in [(1023, "B"), (1024, "KiB"), (3 * GIB, "GiB")]:
        table = trials_table([a_trial(peak_allocated_bytes=1), a_trial(cap_bytes=largest)])
        assert table.startswith(f"trials (memory in {unit};")


def test_a_leak_shows_before_a_long_error():
    leaking = dataclasses.replace(gpu_oom(4), error="x" * 500, leaked_bytes=5 * MIB)
    first, second = remarks(leaking, leaking).values()
    assert first.startswith("LEAKED 5.00 MiB; backward, model.py:142: xxx")
    assert first.endswith("...")
    assert second == "LEAKED 5.00 MiB"


def test_each_kind_of_error_is_shown_once_and_in_one_line():
    hung = a_trial(
        verdict=Verdict.TIMED_OUT,
        error="it timed out\nthe end of its stderr:\nmuch",
        where="train.py:12",
    )
    other = dataclasses.replace(gpu_oom(3), where="optimizer step")
    assert remarks(gpu_oom(4), gpu_oom(3), gpu_trial(1), other, hung) == {
        0: "backward, model.py:142: CUDA out of memory. Tried to allocate 2.00 GiB",
        4: "train.py:12: it timed out",
    }


def rows(block):
    return [" ".join(row.cells[:2]) for row in block.content.rows]


def test_a_long_table_has_the_trials_that_decide():
    grown = [a_trial(2**power) for power in range(12)]
    failed = [a_trial(4096, Verdict.OOM), a_trial(128, steps=50)]  # the look comes last
    bisected = [a_trial(size, phase=Phase.BISECT) for size in range(2100, 3000, 100)]
    hung = a_trial(3000, Verdict.TIMED_OUT, Phase.BISECT)
    last = [a_trial(2901, Verdict.OOM, Phase.RECHECK), a_trial(2900, phase=Phase.CONFIRM)]
    searched = [*grown, *failed, *bisected, hung, *last]
    table = trials_block(searched, 2900, mentioned={2900, 2200})
    assert rows(table) == [
        "1 grow", "256 grow", "512 grow", "1024 grow", "2048 grow", "4096 grow", "128 grow",
        "2200 bisect", "2900 bisect", "3000 bisect", "2901 recheck", "2900 confirm",
    ]  # fmt: skip
    assert table.content.foot == [
        "  ... 14 of 26 trials left out; all are in result.trials, the JSON, the page, and with --verbose"
    ]
    assert len(rows(trials_block(searched, 2900))) == len(searched)
    moved_down = [a_trial(size, Verdict.OOM, Phase.CONFIRM) for size in range(30, 10, -1)]
    assert "128 grow" in rows(trials_block([*searched, *moved_down], 2900, mentioned={2900}))
    assert rows(trials_block(searched[:12], 8, mentioned=())) == rows(
        trials_block(searched[:12], 8)
    )


def test_a_size_above_a_failure_says_why_it_is_tried():
    why = "tried although 6 failed: fragmentation can fail a size and spare a larger one"
    hole = a_trial(6, Verdict.OOM, Phase.BISECT)
    above = [a_trial(size, phase=Phase.BISECT) for size in (7, 8)]
    assert remarks(a_trial(4), hole, *above) == {2: why}
    assert remarks(hole, a_trial(6, phase=Phase.RECHECK), *above) == {}
    assert remarks(hole, a_trial(7, phase=Phase.CONFIRM)) == {}


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
    assert max(map(len, table.splitlines())) <= 100


def test_every_field_of_a_trial_shows_in_the_table():
    """A new field needs a column, a remark, or an entry here."""
    changed = {
        "batch_size": 2, "verdict": Verdict.BUG, "phase": Phase.CONFIRM, "step_s": 1.0, "samples_per_s": 1.0, "error": "x",
        "where": "x", "step_name": "x", "accumulation_steps": 2, "replayed": True, "steps": 9,
        **dict.fromkeys(["cap_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "alloc_retries", "leaked_bytes"], 1),
    }  # fmt: skip
    in_notes = {"peak_upper_bytes", "step_leaked_bytes", "ranks", "limiting_rank", "settled_after"}
    in_notes |= {"pinned_bytes", "host_bytes"}  # the report tells those of the answer
    assert set(changed) == {field.name for field in dataclasses.fields(Trial)} - in_notes
    for name, value in changed.items():
        assert trials_table([a_trial(**{"batch_size": 1, name: value})]) != trials_table(
            [a_trial()]
        )
    assert trials_table([]) == "no trial was run"
