import dataclasses
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_result import a_result, a_trial, results, trials

from oomprobe import report
from oomprobe.fit import fit_line
from oomprobe.result import Phase, ProbeResult, Trial
from oomprobe.units import parse_bytes
from oomprobe.verdict import Verdict

GOLDEN = Path(__file__).parent / "golden"
GIB, MIB = 2**30, 2**20
VERDICT = re.compile(r"^verdict: batch (\d+)", re.MULTILINE)
CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of which "
    "1.11 GiB is free. Including non-PyTorch memory, this process has 22.51 GiB memory in use.\nsecond line"
)
HOST_OOM = (
    '[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: not enough memory: you tried to allocate '
    "268435456 bytes. Buy new RAM!"
)  # fmt: skip


# Results to look at: a GPU, a host, a limit that is not memory, and one with everything wrong with it.


def gpu_trial(batch_size, phase=Phase.GROW, cap=None, **rest):
    peak = GIB + 200 * MIB * batch_size
    step_s = 0.004 + 0.001 * batch_size
    measured = {"steps": 3, "step_s": step_s, "samples_per_s": batch_size / step_s}
    return a_trial(
        batch_size,
        phase=phase,
        cap_bytes=cap,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=peak + peak // 50,
        **{**measured, **rest},
    )


def gpu_oom(batch_size, phase=Phase.GROW, cap=None, **rest):
    held = cap or 24 * GIB
    return a_trial(
        batch_size,
        Verdict.OOM,
        phase,
        cap_bytes=cap,
        peak_allocated_bytes=held - 900 * MIB,
        peak_reserved_bytes=held - 100 * MIB,
        error=CUDA_OOM,
        where="backward, model.py:142",
        **rest,
    )


def gpu():
    cap = 21 * GIB + 614 * MIB
    grow = [gpu_trial(2**power) for power in range(7)]
    bisect = [
        gpu_trial(96, Phase.BISECT, cap),
        gpu_oom(112, Phase.BISECT, cap),
        gpu_oom(104, Phase.BISECT, cap),
        gpu_oom(100, Phase.BISECT, cap),
        gpu_trial(98, Phase.BISECT, cap, alloc_retries=1),
        gpu_oom(99, Phase.BISECT, cap),
        gpu_oom(99, Phase.RECHECK, cap),
    ]
    ran = (*grow, gpu_oom(128), *bisect, gpu_trial(98, Phase.CONFIRM, cap, steps=5))
    return ProbeResult(
        batch_size=98,
        limit_batch_size=98,
        first_failing_batch_size=128,
        limited_by="memory",
        trials=ran,
        fit=fit_line([(t.batch_size, t.peak_allocated_bytes) for t in ran if t.passed], cap),
        device="NVIDIA GeForce RTX 4090",
        budget_bytes=cap,
        available_bytes=24 * GIB,
        notes=("batch 98 gave its cache back once to serve a request: near the budget, steps take longer.",),
        not_covered=(
            "the longest sequence of your data",
            "the evaluation step",
            "checkpoint saving",
            "other ranks",
        ),
        state_verified=True,
        estimates={"total / peak of batch 1": 117.0, "2 x parameters": None},
        options={"memory_fraction": 0.9, "global_batch": 1009, "world_size": 1},
        elapsed_s=41.2,
        in_steps_s=34.0,
    )


def host():
    def ran(batch_size, phase=Phase.GROW, cap=256 * MIB):
        peak = 30 * MIB + 2 * MIB * batch_size
        speed = batch_size / (0.2 * batch_size)
        return a_trial(batch_size, phase=phase, cap_bytes=cap, peak_allocated_bytes=peak, steps=3,
                       step_s=0.2 * batch_size, samples_per_s=speed)  # fmt: skip

    def failed(batch_size, phase=Phase.GROW, cap=256 * MIB):
        return a_trial(batch_size, Verdict.HOST_OOM, phase, cap_bytes=cap, error=HOST_OOM, where="forward, net.py:9")

    cap = 128 * MIB
    tried = (
        *(ran(16), ran(32), ran(64), failed(128)),
        *(failed(64, Phase.BISECT, cap), ran(48, Phase.BISECT, cap), failed(56, Phase.BISECT, cap)),
        *(failed(56, Phase.RECHECK, cap), ran(48, Phase.CONFIRM, cap)),
    )
    return ProbeResult(
        batch_size=48,
        limit_batch_size=64,
        first_failing_batch_size=128,
        limited_by="host_memory",
        trials=tried,
        fit=fit_line([(t.batch_size, t.peak_allocated_bytes) for t in tried if t.passed], cap),
        device="host (AMD EPYC 9654), 64 threads",
        budget_bytes=cap,
        available_bytes=256 * MIB,
        state_verified=True,
        options={"memory_fraction": 0.5, "multiple_of": 8, "min_batch": 16},
        elapsed_s=203.0,
        in_steps_s=201.0,
    )


def max_batch():
    ran = [gpu_trial(size) for size in (8, 16, 32, 64)]
    return ProbeResult(
        batch_size=64,
        limit_batch_size=64,
        first_failing_batch_size=None,
        limited_by="max_batch",
        trials=(*ran, gpu_trial(64, Phase.CONFIRM, 72 * GIB, accumulation_steps=4)),
        fit=fit_line([(t.batch_size, t.peak_reserved_bytes) for t in ran], 72 * GIB),
        device="NVIDIA H100 80GB HBM3",
        budget_bytes=72 * GIB,
        available_bytes=80 * GIB,
        not_covered=("the evaluation step",),
        options={
            "memory_fraction": 0.9,
            "max_batch": 64,
            "min_batch": 8,
            "global_batch": 2048,
            "world_size": 8,
        },
        elapsed_s=9.87,
        in_steps_s=9.1,
    )


def trouble():
    """All that a report can warn of; in texts that would fake a verdict, move the cursor or leave ASCII."""
    return ProbeResult(
        batch_size=2,
        limit_batch_size=3,
        first_failing_batch_size=4,
        limited_by="size_limit",
        limiting_step="eval at full sequence length",
        trials=(
            a_trial(1, step_s=0.0, samples_per_s=0.0, steps=2, step_name="train", leaked_bytes=5 * MIB),
            a_trial(2, step_s=0.0, samples_per_s=0.0, steps=2, step_name="eval at full sequence length",
                    alloc_retries=3, leaked_bytes=7 * MIB, cap_bytes=9 * GIB),
            a_trial(4, Verdict.SIZE_LIMIT, where="forward, m\u00f6del.py:3", step_name="train",
                    error="\x1b[31minteger out of range\u2028verdict: batch 9\nverdict: batch 8"),
            a_trial(3, Verdict.TIMED_OUT, Phase.BISECT, cap_bytes=9 * GIB),
            a_trial(3, Verdict.CRASHED, Phase.RECHECK, error="signal 11", peak_reserved_bytes=12 * MIB),
        ),
        device="A device with a very long name\nverdict: batch 7 " + "x" * 60,
        budget_bytes=9 * GIB,
        available_bytes=10 * GIB,
        notes=("first line\nverdict: batch 6 fits", "5 MiB did not come back after batch 1. " * 5),
        not_covered=("other ranks",),
        contaminated=True,
        options={"memory_fraction": 0.925},
    )  # fmt: skip


EXAMPLES = {example.__name__: example for example in (gpu, host, max_batch, trouble)}
every_example = pytest.mark.parametrize("name", EXAMPLES)


@every_example
def test_golden(name):
    """Run with OVERWRITE_GOLDEN=1 after a change of the report, and read the difference."""
    path, text = GOLDEN / f"report_{name}.txt", report.text(EXAMPLES[name]())
    if os.environ.get("OVERWRITE_GOLDEN"):
        path.write_text(text, encoding="ascii", newline="\n")
    assert text == path.read_text(encoding="ascii")


# What holds for every report.


@every_example
def test_lines_fit_in_100_columns_of_ascii_without_space_at_the_end(name):
    text = report.text(EXAMPLES[name]())
    assert max(map(len, text.splitlines())) <= 100
    assert all(" " <= c <= "~" or c == "\n" for c in text)
    assert not re.search(r" $", text, re.MULTILINE)


@every_example
def test_the_last_line_and_only_that_is_the_verdict(name):
    result = EXAMPLES[name]()
    text = report.text(result)
    assert VERDICT.findall(text) == [str(result.batch_size)]
    assert VERDICT.match(text.splitlines()[-1])


@given(results)
def test_no_result_makes_it_raise_or_say_two_verdicts(result):
    text = report.text(result)
    assert VERDICT.findall(text) == [str(result.batch_size)]
    assert text.isascii()
    assert text.count("\n") == len(text.splitlines())


numbers = st.sampled_from([0, 1, -1, 2**31, 10**18, 2**200, 10**300])
floats = st.sampled_from([None, 0.0, -1.0, 1e-300, 5e-324, 1e300, float("inf"), float("nan")])


@given(st.data())
def test_extreme_values_do_not_make_it_raise(data):
    trial = a_trial(
        data.draw(numbers),
        data.draw(st.sampled_from(Verdict)),
        step_s=data.draw(floats),
        samples_per_s=data.draw(floats),
        peak_allocated_bytes=data.draw(numbers),
        leaked_bytes=data.draw(numbers),
    )
    names = ("fixed_bytes", "bytes_per_sample", "r_squared", "max_relative_error")
    of_fit = {name: data.draw(floats) or 0.0 for name in names}
    line = fit_line([(1, 1), (2, 2), (3, 3)], 10)
    result = a_result(
        batch_size=data.draw(numbers.filter(lambda n: n > 0)),
        trials=(trial, a_trial(), trial),
        fit=dataclasses.replace(line, **of_fit, predicted_max_batch=data.draw(st.none() | numbers)),
        budget_bytes=data.draw(numbers),
        available_bytes=data.draw(numbers),
        elapsed_s=data.draw(floats) or 0.0,
        estimates={"a rule": data.draw(floats)},
    )
    assert len(VERDICT.findall(report.text(result))) == 1
    assert "\n" not in report.trial_line(trial)


@pytest.mark.parametrize(
    "options",
    [
        {"global_batch": "many"},
        {"global_batch": -3},
        {"world_size": 0.5},
        {"multiple_of": "x"},
        {"multiple_of": -2},
        {"memory_fraction": "most"},
        {"memory_fraction": None},
    ],
)
def test_options_of_a_file_edited_by_hand_do_not_hide_the_trials(options):
    assert "verdict: batch 4 fits" in report.text(a_result(options=options))


def test_it_prints_nothing(capsys):
    report.text(gpu())
    assert capsys.readouterr() == ("", "")


# The table.

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
    unit, rows = parse(report.trials_table(trials))
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
        for head, value, read in (
            ("time/step", trial.step_s, seconds),
            ("samples/s", trial.samples_per_s, float),
        ):
            shown = row.get(head)
            assert (shown is None) == (value is None)
            if shown is not None:
                assert read(shown) == pytest.approx(value, rel=0.006)


@given(st.lists(trials, max_size=5))
def test_any_trials_make_a_table_with_a_row_for_each(some):
    table = report.trials_table(some)
    rows = [line for line in table.splitlines()[2:] if not line.lstrip().startswith("^")]
    assert len(rows) == len(some)
    assert table.isascii()


def test_no_trial_is_said():
    assert report.trials_table(()) == "no trial was run"


def test_columns_that_no_trial_measured_are_left_out():
    heading = report.trials_table([a_trial()]).splitlines()[1].split()
    assert heading == ["batch", "phase", "verdict", "steps"]


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
def test_one_measurement_is_enough_for_a_column_and_zero_is_a_measurement(head, measured):
    _, (row, other) = parse(report.trials_table([a_trial(**measured), a_trial()]))
    assert row[head] is not None
    assert other[head] is None


@pytest.mark.parametrize(
    ("largest", "unit"),
    [(1, "B"), (1023, "B"), (1024, "KiB"), (3 * MIB, "MiB"), (3 * GIB, "GiB"), (2**45, "TiB")],
)
def test_the_largest_number_chooses_the_unit_of_the_table(largest, unit):
    table = report.trials_table([a_trial(peak_allocated_bytes=1), a_trial(cap_bytes=largest)])
    assert parse(table)[0] == unit


def test_a_leak_shows():
    _, rows = parse(report.trials_table([a_trial(), a_trial(leaked_bytes=5 * MIB)]))
    assert "remark" not in rows[0]
    assert rows[1]["remark"] == "LEAKED 5.00 MiB"


def test_a_leak_shows_before_an_error_of_any_length_and_again_with_the_same_error():
    leaking = dataclasses.replace(gpu_oom(4), error="x" * 500, leaked_bytes=5 * MIB)
    _, rows = parse(report.trials_table([leaking, leaking]))
    assert rows[0]["remark"].startswith("LEAKED 5.00 MiB; backward, model.py:142: xxx")
    assert rows[0]["remark"].endswith("...")
    assert rows[1]["remark"] == "LEAKED 5.00 MiB"


def test_an_error_is_shown_where_it_first_comes_and_when_it_changes():
    other = dataclasses.replace(gpu_oom(3), where="optimizer step")
    _, rows = parse(report.trials_table([gpu_oom(4), gpu_oom(3), gpu_trial(1), gpu_oom(2), other, gpu_oom(2)]))
    assert ["remark" in row for row in rows] == [True, False, False, False, True, True]
    assert rows[0]["remark"] == "backward, model.py:142: CUDA out of memory. Tried to allocate 2.00 GiB"


def test_all_columns_fit_in_100_and_the_step_name_gives_way():
    full = dataclasses.replace(gpu_oom(10**5, cap=24 * GIB), step_name="n" * 40, step_s=1.0, samples_per_s=9.0)
    lines = report.trials_table([full]).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[2].rstrip().endswith("nnn...")


# The line for one trial.


def test_one_trial_is_one_line():
    assert report.trial_line(gpu_oom(64, Phase.BISECT, 20 * GIB)) == (
        "batch 64  out of memory  bisect  peak 19.90 GiB  cap 20.00 GiB  backward, model.py:142: CUDA out..."
    )
    assert report.trial_line(gpu_trial(64)) == "batch 64  fits  grow  peak 13.77 GiB  941 samples/s"
    assert report.trial_line(a_trial(3, step_name="eval", leaked_bytes=MIB, accumulation_steps=4)) == (
        "batch 3  fits  grow  eval  LEAKED 1.00 MiB  4 accumulation steps"
    )


@given(trials)
def test_any_trial_is_one_line_of_at_most_100_columns(trial):
    line = report.trial_line(trial)
    assert len(line) <= 100
    assert line.isascii()
    assert line.isprintable()


# The sentences.


def sentence(result, word):
    [line] = [line.strip() for line in report.text(result).splitlines() if word in line]
    return line


def timed(**speeds):
    return a_result(
        batch_size=32,
        trials=tuple(a_trial(int(size[1:]), samples_per_s=speed) for size, speed in speeds.items()),
    )


def test_the_smallest_batch_that_is_as_fast_is_named():
    assert sentence(timed(b4=500.0, b8=970.0, b16=960.0, b32=1000.0), "throughput") == (
        "throughput  batch 8 is already within 3 % of the throughput of 32 (970 against 1000 samples/s)"
    )


@pytest.mark.parametrize(
    ("speed", "words"),
    [
        (949.0, "1000 samples/s at batch 32; no smaller size that ran comes within 5 % of it"),
        (950.0, "batch 8 is already within 5 % of"),
        (979.0, "batch 8 is already within 3 % of"),  # 2.1 is not within 2
        (1200.0, "batch 8 is already within 1 % of"),
    ],
)
def test_the_share_holds(speed, words):
    assert words in report.text(timed(b8=speed, b32=1000.0))


def test_a_failed_or_accumulating_trial_is_no_throughput():
    slow = timed(b8=100.0, b32=1000.0)
    fast = (
        a_trial(8, Verdict.OOM, samples_per_s=1000.0),
        a_trial(16, samples_per_s=1e3, accumulation_steps=2),
    )
    assert "no smaller size" in report.text(dataclasses.replace(slow, trials=slow.trials + fast))


@pytest.mark.parametrize("speeds", [{"b8": 5.0}, {"b8": 5.0, "b32": 0.0}, {"b32": None}, {"b32": float("nan")}])
def test_without_a_speed_of_the_answer_nothing_is_said_of_throughput(speeds):
    assert "throughput" not in report.text(timed(**speeds))


@pytest.mark.parametrize(
    ("predicted", "tried", "words"),
    [
        (4, (), "the same as the answer"),
        (3, (), "too low, not run"),
        (3, (a_trial(3),), "too low, ran with all the memory"),
        (3, (a_trial(3, cap_bytes=91),), "too low, ran with all the memory"),
        (3, (a_trial(3, cap_bytes=90), a_trial(3)), "too low, ran under the budget"),
        (5, (a_trial(5, Verdict.OOM, cap_bytes=90),), "too high, failed under the budget"),
        (
            5,
            (a_trial(5, Verdict.OOM, cap_bytes=90), a_trial(5)),
            "too high, failed under the budget",
        ),
        (7, (a_trial(6, Verdict.OOM),), "too high, not run, batch 6 failed"),
        (5, (), "higher than the answer, not run"),
        (5, (a_trial(6, Verdict.OOM),), "higher than the answer, not run"),
        # A failure that its recheck struck out shows nothing.
        (
            6,
            (a_trial(5, Verdict.OOM), a_trial(5, phase=Phase.RECHECK)),
            "higher than the answer, not run",
        ),
    ],
)
def test_the_line_is_judged_by_what_ran(predicted, tried, words):
    fit = dataclasses.replace(a_result().fit, predicted_max_batch=predicted)
    text = " ".join(report.text(a_result(fit=fit, trials=(a_trial(4), *tried))).split())
    assert f"the line would have answered {predicted} (not used): {words} plan" in text


def test_the_line_keeps_to_multiple_of_like_the_search():
    fit = dataclasses.replace(a_result().fit, predicted_max_batch=7)
    assert "answered 4 (not used): the same" in report.text(a_result(fit=fit, options={"multiple_of": 4}))


@pytest.mark.parametrize(
    ("limited_by", "words"),
    [
        ("memory", "the memory of the device"),
        ("host_memory", "the memory of the host"),
        ("max_batch", "the max_batch of the call, not memory"),
        ("size_limit", "a size limit that is not memory"),
        ("a new word", "a new word"),
    ],
)
def test_what_limits_is_said_in_words(limited_by, words):
    assert f"limited by {words}" in report.text(a_result(limited_by=limited_by))


def test_the_limiting_step_is_named():
    assert sentence(a_result(limiting_step="eval"), "limited by").endswith(", in step 'eval'")


def checked(**changes):
    trials = (a_trial(8, phase=Phase.CONFIRM), a_trial(8, phase=Phase.RECHECK))
    return a_result(batch_size=8, limit_batch_size=8, limited_by="max_batch", trials=trials, **changes)


def test_a_check_asks_for_one_size_and_says_nothing_of_a_limit():
    text = report.text(checked())
    assert "limit       batch 8 was asked for, and ran\n" in text
    assert "no other size was tried: larger ones may fit too (find_max_batch looks for them)\n" in text
    assert "max_batch of the call" not in text
    assert "is the largest that ran" not in text
    assert "and ran; step 'eval' takes the most memory\n" in report.text(checked(limiting_step="eval"))


def test_a_search_that_tried_one_size_was_limited_by_max_batch():
    grown = (a_trial(8, phase=Phase.GROW), a_trial(8, phase=Phase.CONFIRM))
    result = dataclasses.replace(checked(), trials=grown)
    assert "limited by the max_batch of the call, not memory" in report.text(result)


def test_an_example_plan_is_the_power_of_two_of_at_least_four_batches():
    for batch_size, example in ((1, 4), (2, 8), (3, 16), (64, 256), (65, 512)):
        assert f"for example global batch {example} =" in report.text(a_result(batch_size=batch_size))


def test_a_plan_says_what_ran():
    text = report.text(gpu())
    assert "1008 = 84 x 12" not in text
    assert re.search(r"1009 = 1 x 1009, exact; micro-batch 1: ran$", text, re.MULTILINE)
    assert re.search(r"= 91 x 11, near; micro-batch 91: not run$", text, re.MULTILINE)
    assert "micro-batch 64: ran, also with accumulation" in report.text(max_batch())


def test_a_state_that_was_not_compared_is_not_called_restored():
    assert "bit for bit: identical" in report.text(a_result(state_verified=True))
    assert "identical" not in report.text(a_result(state_verified=False))
    assert "not compared" in report.text(a_result(state_verified=False))


def test_contamination_is_loud_and_next_to_the_verdict():
    *_, end = report.text(a_result(contaminated=True)).split("\n\n")
    *loud, verdict = end.splitlines()
    assert loud[0].startswith("!! WARNING: ")
    assert all(line.startswith("!! ") for line in loud)
    assert verdict.startswith("verdict")
    assert "WARNING" not in report.text(a_result())


def test_the_verdict_says_memory_share_and_device():
    line = report.text(gpu()).splitlines()[-1]
    assert line == "verdict: batch 98 fits in 21.60 GiB (90 % of 24.00 GiB on NVIDIA GeForce RTX 4090)"


def test_a_trial_has_no_field_that_the_table_forgets():
    """Every field of `Trial` changes the table: a new field needs a column, a remark, or a line here."""
    plain = a_trial()
    changed = {
        "batch_size": 2, "verdict": Verdict.BUG, "phase": Phase.CONFIRM, "steps": 9, "cap_bytes": 1,
        "peak_allocated_bytes": 1, "peak_reserved_bytes": 1, "step_s": 1.0, "samples_per_s": 1.0,
        "alloc_retries": 1, "leaked_bytes": 1, "error": "x", "where": "x", "step_name": "x",
        "accumulation_steps": 2,
    }  # fmt: skip
    assert set(changed) == {field.name for field in dataclasses.fields(Trial)}
    for name, value in changed.items():
        assert report.trials_table([dataclasses.replace(plain, **{name: value})]) != report.trials_table([plain])
