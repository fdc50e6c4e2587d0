import dataclasses
import re

import pytest
from helpers import a_result, a_trial
from helpers import text_of as report

from oomprobe.records.trials import Phase, Verdict


def sentence(result, word):
    """What the report says after a word, on however many lines."""
    [found] = re.findall(rf"^  {word}.*(?:\n {{16}}.*)*", report(result), re.MULTILINE)
    return re.sub(r"\s+", " ", found)


def timed(**speeds):
    return a_result(
        batch_size=32,
        trials=tuple(a_trial(int(size[1:]), samples_per_s=speed) for size, speed in speeds.items()),
    )


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        (
            {"b4": 500.0, "b8": 970.0, "b16": 960.0, "b32": 1000.0},
            "; batch 8 is as fast, within the timing noise of 5 %",
        ),
        ({"b4": 2100.0, "b8": 1200.0, "b32": 1000.0}, "Memory may be spilling to the host"),
        (
            {"b8": 949.0, "b32": 1000.0},
            "; every smaller size that ran is slower by more than the timing noise of 5 %",
        ),
        ({"b32": 1000.0}, "1000 samples/s"),
    ],
)
def test_rates_are_compared_beyond_the_timing_noise(speeds, words):
    said = sentence(timed(**speeds), "throughput")
    assert words in said
    assert ("spilling" in said) == ("spilling" in words)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            (),
            (a_trial(8, samples_per_s=1272.0),),
            "is faster, 1272 samples/s, by more than the timing noise of 17 %",
        ),
        (
            (a_trial(8, samples_per_s=1272.0),),
            (),
            "batch 8 is as fast, within the timing noise of 17 %",
        ),
        ((), (a_trial(16, Verdict.OOM, samples_per_s=9e3),), "batch 8 is faster, 1060 samples/s"),
        (
            (),
            (a_trial(16, samples_per_s=9e3, accumulation_steps=2),),
            "batch 8 is faster, 1060 samples/s",
        ),
    ],
    ids=["a faster repetition", "a slower one", "a failure", "accumulation"],
)
def test_the_timing_noise_is_the_spread_of_repeated_trials(before, after, words):
    result = timed(b8=1060.0, b32=1000.0)
    again = dataclasses.replace(result, trials=(*before, *result.trials, *after))
    assert words in sentence(again, "throughput")


@pytest.mark.parametrize(
    ("predicted", "tried", "words"),
    [
        (4, (), "the same as the answer"),
        (3, (), "too low"),
        (5, (a_trial(5, Verdict.OOM, cap_bytes=90),), "too high, batch 5 failed"),
        (7, (a_trial(8, Verdict.OOM), a_trial(6, Verdict.OOM)), "too high, batch 6 failed"),
        (5, (a_trial(6, Verdict.OOM),), "above the answer, where nothing failed"),
        # A failure that passed its recheck does not count.
        (
            6,
            (a_trial(5, Verdict.OOM), a_trial(5, phase=Phase.RECHECK)),
            "above the answer, where nothing failed",
        ),
    ],
)
def test_the_linear_fit_is_judged_by_the_failures(predicted, tried, words):
    fit = dataclasses.replace(a_result().fit, predicted_max_batch=predicted)
    line = sentence(a_result(fit=fit, trials=(a_trial(4), *tried)), "linear fit")
    assert f"{predicted}, not used: {words};" in line


def test_the_error_of_the_linear_fit_is_reported_and_its_size_a_multiple():
    fit = dataclasses.replace(a_result().fit, predicted_max_batch=7)
    for share, words in (
        (0.081, "up to 8.1 %"),
        (10.0, "up to 1000.0 %"),
        (9.4e6, "more than 1000 %"),
    ):
        result = a_result(
            fit=dataclasses.replace(fit, max_relative_error=share), options={"multiple_of": 4}
        )
        assert sentence(result, "linear fit").endswith(f"; the fit is off by {words}")
        assert "  4, not used: the same" in report(result)


# Two passes of the answer, one of a plan, a size that failed in confirmation after it had passed, and deaths.
TRIED = (
    a_trial(4, phase=Phase.CONFIRM, steps=50),
    a_trial(4, accumulation_steps=2, steps=3),
    a_trial(7),
    a_trial(7, Verdict.OOM, Phase.CONFIRM),
    a_trial(5, Verdict.CRASHED),
    a_trial(5, Verdict.TIMED_OUT),
    a_trial(5, Verdict.OOM, accumulation_steps=2),
    a_trial(8, Verdict.OOM),
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"limited_by": "max_batch"}, "max_batch, not memory"),
        ({"limiting_step": "eval"}, "memory, in step 'eval'; batch"),
        ({"trials": ()}, "memory; batch 4 ran"),
        (
            {"trials": TRIED[:2], "limited_by": "max_batch"},
            "nothing larger was tried; batch 4 ran for 50 calls",
        ),
        ({"trials": TRIED}, "memory; batch 4 ran for 50 calls; batch 7 failed"),
        (
            {"trials": TRIED, "environment": {"command": "train.py"}},
            "batch 4 ran for 50 optimizer steps; batch 7 failed",
        ),
        (
            {
                "trials": (a_trial(6), *TRIED, a_trial(5, Verdict.OOM, cap_bytes=90)),
                "limit_batch_size": 6,
                "first_failing_batch_size": 8,
            },
            "memory; batch 4 ran for 50 calls; batch 5 failed under the budget (90 B); without it, batch 6 ran and 8 failed",
        ),
        (
            {
                "trials": (
                    a_trial(6, replayed=True),
                    *TRIED,
                    a_trial(5, Verdict.OOM, cap_bytes=90, replayed=True),
                ),
                "limit_batch_size": 6,
            },
            "batch 5 failed a replay under the budget (90 B); without it, batch 6 passed a replay",
        ),
    ],
)
def test_the_limit_is_described(changes, words):
    line = sentence(a_result(**changes), "limited by")
    assert words in line
    assert "trials" not in changes or line.endswith(words)


def checked(**changes):
    trials = (a_trial(8, phase=Phase.CONFIRM), a_trial(8, phase=Phase.RECHECK))
    return a_result(
        batch_size=8, limit_batch_size=8, limited_by="max_batch", trials=trials, **changes
    )


def test_a_check_asks_for_one_size_and_says_nothing_of_a_limit():
    text = report(checked(limiting_step="eval"))
    assert (
        "checked     batch 8 was asked for, and ran; step 'eval' takes the most memory; no other"
        in text
    )
    assert "max_batch, not memory" not in text
    assert "limited by" not in text


def test_a_search_that_tried_one_size_was_limited_by_max_batch():
    grown = (a_trial(8, phase=Phase.GROW), a_trial(8, phase=Phase.CONFIRM))
    assert "max_batch, not memory" in report(dataclasses.replace(checked(), trials=grown))


def test_a_plan_says_what_ran():
    trials = (a_trial(48), a_trial(48, accumulation_steps=2))
    accumulated = a_result(
        batch_size=48, trials=trials, options={"global_batch": 192, "world_size": 2}
    )
    assert "192 = 48 x 2 x 2, exact; micro-batch 48: ran, also with accumulation" in report(
        accumulated
    )


@pytest.mark.parametrize(
    ("steps", "repeated", "says"), [(2, (), True), (3, (), False), (2, (5,), False)]
)
def test_a_rate_that_one_call_gave_is_said_to(steps, repeated, says):
    trials = [a_trial(8, samples_per_s=970.0, steps=calls) for calls in (steps, *repeated)]
    result = a_result(batch_size=32, trials=(*trials, a_trial(32, samples_per_s=1000.0, steps=5)))
    assert sentence(result, "throughput").endswith(
        "within the timing noise of 5 %" + ", by one call" * says
    )
