"""What a result and an error say, from trials made by hand."""

import dataclasses
import types

import pytest
from test_result import a_trial

from oomprobe.devices import DeviceInfo
from oomprobe.options import Options
from oomprobe.report import summary
from oomprobe.result import Phase
from oomprobe.search import Found
from oomprobe.verdicts import Verdict

MIB = 2**20


def trial(batch_size, passed=True, **fields):
    verdict = Verdict.FITS if passed else Verdict.OOM
    plain = {"cap_bytes": None, "leaked_bytes": 0, "alloc_retries": 0, "step_s": None, "samples_per_s": None}
    return dataclasses.replace(a_trial(), **{**plain, "batch_size": batch_size, "verdict": verdict, **fields})


def timed(batch_size, step_s):
    return trial(batch_size, step_s=step_s, samples_per_s=batch_size / step_s)


def bench(*trials, on_host=True, step_names=("step",), **options):
    device = DeviceInfo(on_host=on_host, name="a device", total_bytes=2**30, torch_device="cpu")
    return types.SimpleNamespace(
        trials=list(trials),
        device=device,
        options=Options(**options),
        budget_bytes=90 * MIB,
        available_bytes=100 * MIB,
        notes={},
        tenants=lambda: "",
        runner=types.SimpleNamespace(
            replaceable=False, threads=1, device_notes=(), step_names=list(step_names), in_steps_s=0.5
        ),
        clock=types.SimpleNamespace(elapsed_s=1.0),
        neighbours=types.SimpleNamespace(contaminated=False, held_bytes=[], notes=()),
        state_verified=True,
        breakdown=None,
    )


def result(*trials, found=None, **fields):
    return summary.result_of(bench(*trials, **fields), found or Found(batch_size=trials[-1].batch_size))


# --- nothing fits ---


def test_nothing_fits_in_all_the_memory():
    text = str(summary.nothing_fits(bench(trial(1, passed=False))))
    assert text.startswith(
        "batch 1, the smallest allowed, does not fit on a device with all the memory there is: out of memory"
    )
    assert "memory_fraction" not in text


@pytest.mark.parametrize("before", [[], [trial(4)]])
def test_nothing_fits_names_the_budget(before):
    failed = trial(4, passed=False, cap_bytes=90 * MIB)
    text = str(summary.nothing_fits(bench(*before, failed, min_batch=4)))
    assert "does not fit on a device within a budget of 90.00 MiB (memory_fraction=0.9): out of memory" in text
    assert "min_batch below 4" in text
    assert text.endswith("or a larger memory_fraction.")


def test_one_size_that_fails_is_not_the_smallest_of_several():
    failed = trial(250, passed=False, cap_bytes=90 * MIB, phase=Phase.CONFIRM)
    text = str(summary.nothing_fits(bench(failed, min_batch=250, max_batch=250)))
    assert text.startswith(
        "batch 250 does not survive on a device within a budget of 90.00 MiB (memory_fraction=0.9): out of memory"
    )
    assert "smallest" not in text
    assert "min_batch" not in text


# --- the bracket ---


def test_a_failure_below_the_limit_is_not_its_upper_end():
    trials = [trial(8, passed=False), trial(16), trial(32, passed=False, phase=Phase.BISECT), trial(64, passed=False)]
    found = Found(batch_size=16, limit=16, first_failing=8)
    assert result(*trials, found=found).first_failing_batch_size == 64
    assert result(*trials[:3], found=found).first_failing_batch_size is None
    struck = dataclasses.replace(found, transient=(64,))
    assert result(*trials, found=struck).first_failing_batch_size is None


def test_a_failure_above_the_limit_stays_as_it_was_found():
    found = Found(batch_size=16, limit=16, first_failing=20)
    assert result(trial(16), trial(20, passed=False), found=found).first_failing_batch_size == 20


# --- notes ---


def test_a_sample_that_takes_longer_is_noted():
    [note] = result(timed(8, 0.008), timed(32, 0.100)).notes
    assert note.startswith("a sample takes 3.1 times as long at batch 32 as at 8 ")


def test_steps_too_short_to_be_timed_are_no_measure():
    assert result(timed(8, 0.0005), timed(32, 0.1)).notes == ()
    [note] = result(timed(8, 0.0005), timed(16, 0.008), timed(32, 0.1)).notes
    assert "as at 16 " in note


def test_a_leak_says_how_long_the_free_memory_lasts():
    held = {"peak_reserved_bytes": 90 * MIB, "phase": Phase.CONFIRM, "step_leaked_bytes": MIB // 64}
    [note] = result(trial(1), trial(2, **held)).notes
    assert note == (
        "leak: each step at batch 2 keeps 16.00 KiB, and what is left free lasts for about 640 of them; something keeps "
        "tensors of each step"
    )


@pytest.mark.parametrize(
    ("peaks", "above", "steps"),
    [
        ({"peak_reserved_bytes": 36 * MIB}, [trial(3)], 64),
        ({"peak_reserved_bytes": 36 * MIB}, [trial(3, passed=False)], 64),
        ({"peak_reserved_bytes": None, "peak_allocated_bytes": 36 * MIB}, [], 10),
    ],
)
def test_what_an_answer_leaves_free_is_what_it_did_not_take(peaks, above, steps):
    """Live tensors alone say too little: holes between them are used up too."""
    confirmed = trial(2, phase=Phase.CONFIRM, step_leaked_bytes=MIB, **peaks)
    [note] = [line for line in result(trial(1), *above, confirmed).notes if line.startswith("leak")]
    assert f"lasts for about {steps} of them" in note


def test_one_leak_is_told_once():
    kept = trial(2, phase=Phase.CONFIRM, leaked_bytes=6 * MIB, step_leaked_bytes=MIB)
    [note] = result(trial(1), kept).notes
    assert "each step at batch 2 keeps 1.00 MiB" in note


def test_the_plans_trial_is_no_word_about_the_answers_leak():
    confirmed = trial(2, phase=Phase.CONFIRM, step_leaked_bytes=MIB)
    [note] = result(trial(1), confirmed, trial(2, phase=Phase.CONFIRM, accumulation_steps=4)).notes
    assert "each step at batch 2 keeps 1.00 MiB" in note


# --- not covered ---


@pytest.mark.parametrize("name", ["eval", "eval_step", "Val2", "val-epoch", "validation", "my_test"])
def test_a_step_named_for_evaluation_covers_it(name):
    assert not any(line.startswith("evaluation") for line in result(trial(1), step_names=["train", name]).not_covered)


@pytest.mark.parametrize("name", ["interval", "retrieval", "latest", "contest", "valley"])
def test_a_word_inside_another_covers_nothing(name):
    assert any(line.startswith("evaluation") for line in result(trial(1), step_names=[name]).not_covered)


@pytest.mark.parametrize(
    ("name", "covered"), [("longest", True), ("max_len", True), ("along", False), ("softmax", False)]
)
def test_the_longest_sequence(name, covered):
    lines = result(trial(1), step_names=[name]).not_covered
    assert any(line.startswith("longest") for line in lines) is not covered


def test_what_is_never_covered():
    lines = result(trial(1), step_names=["eval", "long", "save", "ddp"]).not_covered
    assert [line.split()[0] for line in lines] == ["data", "state"]
