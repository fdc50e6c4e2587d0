"""The parser knows every option of the contract, and hands on what `find_max_batch` calls them."""

import inspect

import pytest

from oomprobe import InvalidArgumentError, find_max_batch
from oomprobe.cli import SEARCH_OPTIONS, check_run, parser


def parsed(*arguments):
    return parser().parse_args(["run", "train:build", *arguments])


def test_search_options_are_options_of_the_search():
    assert set(SEARCH_OPTIONS) < set(inspect.signature(find_max_batch).parameters)
    assert all(getattr(parsed(), option) is None for option in SEARCH_OPTIONS)


@pytest.mark.parametrize("option", SEARCH_OPTIONS)
def test_what_require_would_ignore_is_refused(option):
    flag = "--" + option.removesuffix("_s").replace("_", "-")
    check_run(parsed(flag, "1"))
    with pytest.raises(InvalidArgumentError, match=flag):
        check_run(parsed("--require", "8", flag, "1"))


@pytest.mark.parametrize(("arguments", "said"), [([], "required: COMMAND"), (["fly"], "invalid choice: 'fly'")])
def test_no_command_is_a_usage_error(capsys, arguments, said):
    with pytest.raises(SystemExit) as left:
        parser().parse_args(arguments)
    assert left.value.code == 2
    assert said in capsys.readouterr().err
