"""stdout is for the answer while it is kept, and as it was afterwards."""

import os
import sys

import pytest

from oomprobe.cli import stdout_kept, tell, write


def test_only_the_answer_goes_to_stdout(capfd):
    before = sys.stdout
    with stdout_kept(for_good=False) as answers:
        sys.stdout.write("from Python\n")
        os.write(1, b"from below\n")
        write(answers, "42\n")
    assert sys.stdout is before
    out, err = capfd.readouterr()
    assert out == "42\n"
    assert {"from Python", "from below"} <= set(err.splitlines())


def test_it_is_as_before_after_an_error_too(capfd):
    before = sys.stdout
    with pytest.raises(KeyError), stdout_kept(for_good=False):
        raise KeyError
    assert sys.stdout is before
    os.write(1, b"on stdout\n")
    assert capfd.readouterr().out == "on stdout\n"


def test_people_are_told_on_stderr(capsys, monkeypatch):
    tell("one", "two")
    assert capsys.readouterr() == ("", "one\ntwo\n")
    monkeypatch.setattr(sys, "stderr", None)
    tell("nobody listens")
