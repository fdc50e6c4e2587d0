import re
from dataclasses import replace

import pytest
from example_results import EXAMPLES, gpu
from helpers import a_result, same_as_golden
from helpers import text_of as report
from hypothesis import given
from strategies import results

from oomprobe.records.notes import Note, NoteKind, warning
from oomprobe.results.trials import FEW

VERDICT = re.compile(r"^verdict: batch (\d+)", re.MULTILINE)
every_example = pytest.mark.parametrize("name", EXAMPLES)


# Facts, and sentences of facts, that only a verbose report has.
VERBOSE = re.compile(
    r"^  estimates .*\n( {14}.*(total / peak|2 x parameters).*\n)*|^ {14}(rank \d: .*|.* per sample, r2 .*)\n",
    re.MULTILINE,
)


@every_example
def test_the_report_is_short_lines_of_ascii_and_the_verbose_one_has_more(name):
    result = EXAMPLES[name]()
    brief, verbose = (report(result, verbose=verbose) for verbose in (False, True))
    same_as_golden(verbose, f"report_{name}.txt")
    without = VERBOSE.sub("", verbose)
    if len(result.trials) > FEW:
        rows, of_all = (text.split("\n\n")[1] for text in (brief, verbose))
        assert set(rows.splitlines()[:-1]) < set(of_all.splitlines())
        without = without.replace(of_all, rows)
    assert brief == without
    assert len(re.findall(r"^  \w", brief.split("\n\n")[2], re.MULTILINE)) <= 8
    assert max(map(len, verbose.splitlines())) <= 100
    assert all(" " <= c <= "~" or c == "\n" for c in verbose)
    assert VERDICT.findall(verbose) == [str(result.batch_size)]


@given(results)
def test_any_result_has_a_report_with_one_verdict(result):
    text = report(result)
    assert VERDICT.findall(text) == [str(result.batch_size)]
    assert text.isascii()


def test_a_brief_report_has_the_trials_that_it_mentions():
    result = gpu()._with_notes(
        [warning("leak: 5.00 MiB was not freed after batch 96, even by garbage collection", 96)]
    )
    assert "\n     96  bisect   fits " not in report(gpu())
    assert "\n     96  bisect   fits " in report(result)
    assert "\n  ... 4 of 16 trials left out; all are in result.trials" in report(gpu())
    for whole in (report(gpu(), verbose=True), report(EXAMPLES["ranks"]())):
        assert "left out" not in whole


def test_the_report_says_where_state_was_not_restored():
    note = Note(text="not restored: trainer.it", kind=NoteKind.NOT_RESTORED)
    result = replace(gpu(), state_verified=False)
    assert "not compared bit for bit" in report(result)
    assert "except what the notes name as not restored" in report(result._with_notes([note]))


def test_contamination_is_a_warning_below_the_verdict():
    verdict, *warning = report(a_result(contaminated=True)).partition("\n\n")[0].splitlines()
    assert warning[0].startswith("!! WARNING: ")
    assert all(line.startswith("!! ") for line in warning)
    assert verdict.startswith("verdict")
    assert "WARNING" not in report(a_result())


@pytest.mark.parametrize(("in_steps_s", "told"), [(30.0, "40 % of it to start"), (0.0, None)])
def test_a_command_whose_steps_are_not_timed_has_no_share_of_them(in_steps_s, told):
    environment = {"command": "python train.py"}
    text = report(a_result(environment=environment, elapsed_s=50.0, in_steps_s=in_steps_s))
    assert ("% of it" in text) is (told is not None)
    assert told is None or told in text
