import dataclasses
import re

import pytest
from example_results import gpu, max_batch
from test_result import a_result, a_trial

from oomprobe.report import page
from oomprobe.result import Phase
from oomprobe.verdicts import Verdict


def sentence(result, word):
    [line] = [line.strip() for line in page.text(result).splitlines() if word in line]
    return line


def timed(**speeds):
    return a_result(
        batch_size=32,
        trials=tuple(a_trial(int(size[1:]), samples_per_s=speed) for size, speed in speeds.items()),
    )


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        ({"b4": 500.0, "b8": 970.0, "b16": 960.0, "b32": 1000.0}, "; batch 8 comes within 5 %, the scatter"),
        ({"b8": 949.0, "b32": 1000.0}, "; no smaller size that ran comes within 5 %, the scatter"),
        ({"b8": 950.0, "b32": 1000.0}, "; batch 8 comes within 5 %, the scatter"),
        ({"b8": 1050.0, "b32": 1000.0}, "; batch 8 comes within 5 %, the scatter"),
        ({"b8": 1060.0, "b32": 1000.0}, "; batch 8 is faster, 1060 samples/s, by more than 5 %, the scatter"),
        ({"b32": 1000.0}, "1000 samples/s"),
    ],
)
def test_rates_are_compared_beyond_their_scatter(speeds, words):
    assert words in sentence(timed(**speeds), "throughput")


def test_the_scatter_is_that_of_repeated_trials():
    result = timed(b8=1060.0, b32=1000.0)
    again = dataclasses.replace(result, trials=(*result.trials, a_trial(8, samples_per_s=1272.0)))
    assert "is faster, 1272 samples/s, by more than 17 %" in sentence(again, "throughput")
    slower = dataclasses.replace(result, trials=(a_trial(8, samples_per_s=1272.0), *result.trials))
    assert "batch 8 comes within 17 %, the scatter" in sentence(slower, "throughput")


def test_a_failed_or_accumulating_trial_is_no_throughput():
    slow = timed(b8=100.0, b32=1000.0)
    fast = (
        a_trial(8, Verdict.OOM, samples_per_s=1000.0),
        a_trial(16, samples_per_s=1e3, accumulation_steps=2),
    )
    assert "no smaller size" in page.text(dataclasses.replace(slow, trials=slow.trials + fast))


@pytest.mark.parametrize("speeds", [{"b8": 5.0}, {"b8": 5.0, "b32": 0.0}, {"b32": None}])
def test_without_a_speed_there_is_no_throughput_line(speeds):
    assert "throughput" not in page.text(timed(**speeds))


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
    line = sentence(a_result(fit=fit, trials=(a_trial(4), *tried)), "linear fit")
    assert f"{predicted}, not used: {words};" in line


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.081, "the fit is off by up to 8.1 %"),
        (10.0, "the fit is off by up to 1000.0 %"),
        (9.4e6, "the fit is off by more than 1000 %"),
    ],
)
def test_how_far_off_the_line_is(share, words):
    fit = dataclasses.replace(a_result().fit, max_relative_error=share)
    assert sentence(a_result(fit=fit), "linear fit").endswith(f"; {words}")


def test_the_line_keeps_to_multiple_of_like_the_search():
    fit = dataclasses.replace(a_result().fit, predicted_max_batch=7)
    assert "  4, not used: the same" in page.text(a_result(fit=fit, options={"multiple_of": 4}))


@pytest.mark.parametrize(
    ("limited_by", "words"),
    [
        ("memory", "memory;"),
        ("host_memory", "host memory;"),
        ("max_batch", "max_batch, not memory"),
        ("size_limit", "a size limit that is not memory"),
        ("a new word", "a new word"),
    ],
)
def test_what_limits_is_said_in_words(limited_by, words):
    assert f"limited by  {words}" in page.text(a_result(limited_by=limited_by))


@pytest.mark.parametrize(("replayed", "word"), [(False, "ran"), (True, "passed a replay")])
def test_a_limit_that_was_only_replayed_did_not_run(replayed, word):
    result = a_result(trials=(a_trial(4, replayed=replayed), a_trial(5, Verdict.OOM)))
    assert f"batch 4 is the largest that {word}, batch 5 failed" in sentence(result, "limited by")


def test_the_limiting_step_is_named():
    assert ", in step 'eval'; batch" in sentence(a_result(limiting_step="eval"), "limited by")


def checked(**changes):
    trials = (a_trial(8, phase=Phase.CONFIRM), a_trial(8, phase=Phase.RECHECK))
    return a_result(batch_size=8, limit_batch_size=8, limited_by="max_batch", trials=trials, **changes)


def test_a_check_asks_for_one_size_and_says_nothing_of_a_limit():
    text = page.text(checked())
    assert "checked     batch 8 was asked for, and ran; no other size was tried\n" in text
    assert "max_batch, not memory" not in text
    assert "is the largest that ran" not in text
    assert "and ran; step 'eval' takes the most memory; no other" in page.text(checked(limiting_step="eval"))


def test_a_search_that_tried_one_size_was_limited_by_max_batch():
    grown = (a_trial(8, phase=Phase.GROW), a_trial(8, phase=Phase.CONFIRM))
    result = dataclasses.replace(checked(), trials=grown)
    assert "max_batch, not memory" in page.text(result)


def test_an_example_plan_is_a_power_of_two():
    for batch_size, example in ((1, 4), (2, 8), (3, 16), (64, 256), (65, 512)):
        assert f"for example global batch {example} =" in page.text(a_result(batch_size=batch_size), verbose=True)


def test_a_plan_says_what_ran():
    text = page.text(gpu())
    assert "1008 = 84 x 12" not in text
    assert re.search(r"1009 = 1 x 1009, exact; micro-batch 1: ran$", text, re.MULTILINE)
    assert re.search(r"= 91 x 11, near; micro-batch 91: not run$", text, re.MULTILINE)
    assert "micro-batch 64: ran, also with accumulation" in page.text(max_batch())


def test_a_state_that_was_not_compared_is_not_called_restored():
    assert "bit for bit: identical" in page.text(a_result(state_verified=True))
    assert "identical" not in page.text(a_result(state_verified=False))
    assert "not compared" in page.text(a_result(state_verified=False))
