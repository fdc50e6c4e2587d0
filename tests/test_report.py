import dataclasses
import re

import pytest
from example_results import EXAMPLES
from helpers import a_result, a_trial, same_as_golden
from hypothesis import given
from hypothesis import strategies as st
from strategies import results

from oomprobe.records.fit import fit_line
from oomprobe.records.trials import Verdict
from oomprobe.report.table import text as report
from oomprobe.report.trials import trial_line

VERDICT = re.compile(r"^verdict: batch (\d+)", re.MULTILINE)
every_example = pytest.mark.parametrize("name", EXAMPLES)


# Facts, and sentences of facts, that only a verbose report has.
VERBOSE = re.compile(
    r"^  estimates .*\n( {14}.*(total / peak|2 x parameters).*\n)*|^ {14}(rank \d: .*|.* per sample, r2 .*)\n",
    re.MULTILINE,
)


@every_example
def test_the_verbose_report_equals_its_golden_file(name):
    same_as_golden(report(EXAMPLES[name](), verbose=True), f"report_{name}.txt")


@every_example
def test_a_brief_report_is_the_verbose_one_without_details(name):
    brief, verbose = (report(EXAMPLES[name](), verbose=verbose) for verbose in (False, True))
    without, *details = VERBOSE.sub("", verbose).split("\nnot covered by the trials:\n")
    items = [line.removeprefix("  - ") for line in "".join(details).splitlines()]
    assert brief == without + "".join(f"\nnot covered: {'; '.join(items)}\n" for _ in details)


def test_a_brief_report_names_what_was_not_covered_without_details():
    items = (
        "evaluation (pass {'eval': eval_fn})",
        "other ranks: DDP buckets",
        "longest sample, unless made",
        "workers",
    )
    told = report(a_result(not_covered=items))
    assert told.endswith("\nnot covered: evaluation; other ranks; longest sample; workers\n")


@every_example
def test_a_report_is_short_lines_of_ascii_after_one_verdict(name):
    result = EXAMPLES[name]()
    facts = report(result).split("\n\n")[2]
    assert len(re.findall(r"^  \w", facts, re.MULTILINE)) <= 8
    text = report(result, verbose=True)
    assert max(map(len, text.splitlines())) <= 100
    assert all(" " <= c <= "~" or c == "\n" for c in text)
    assert not re.search(r" $", text, re.MULTILINE)
    assert VERDICT.findall(text) == [str(result.batch_size)]
    assert VERDICT.match(text)


@given(results)
def test_any_result_has_a_report_with_one_verdict(result):
    text = report(result)
    assert VERDICT.findall(text) == [str(result.batch_size)]
    assert text.isascii()


numbers = st.sampled_from([0, 1, -1, 2**31, 10**18, 2**200, 10**300])
floats = st.sampled_from([None, 0.0, -1.0, 1e-300, 5e-324, 1e300, float("inf"), float("nan")])


@given(st.data())
def test_a_result_with_extreme_values_has_a_report(data):
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
    assert len(VERDICT.findall(report(result))) == 1
    assert "\n" not in trial_line(trial)


def test_contamination_is_a_warning_below_the_verdict():
    verdict, *warning = report(a_result(contaminated=True)).partition("\n\n")[0].splitlines()
    assert warning[0].startswith("!! WARNING: ")
    assert all(line.startswith("!! ") for line in warning)
    assert verdict.startswith("verdict")
    assert "WARNING" not in report(a_result())
