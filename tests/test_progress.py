import fcntl
import io
import os
import re
import select
import struct
import sys
import termios
import types

import pytest
import torch
from helpers import a_trial
from ledger import MIB, LedgerDevice

import oomprobe
from oomprobe.errors import InvalidArgumentError
from oomprobe.records.options import Options
from oomprobe.records.trials import Phase, Verdict
from oomprobe.results.progress import reporter
from oomprobe.results.trials import trial_line


class Terminal(io.StringIO):
    """A terminal of one line."""

    def isatty(self):
        return True

    @property
    def screen(self):
        """What is visible after the last write."""
        lines = self.getvalue().split("\r\x1b[K")
        assert all("\n" not in line and "\r" not in line for line in lines)
        return lines[-1]


@pytest.fixture(autouse=True)
def on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def write_to(monkeypatch, stream):
    """Replace stderr, in the test itself: between fixtures and test, pytest puts its own there."""
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def play(status, *trials):
    for trial in trials:
        status.started(trial.batch_size, trial.phase)
        status.finished(trial)
    status.close()


GOOD, BAD = a_trial(64), a_trial(128, Verdict.OOM)


def lines(trial):
    return (
        trial_line(trial).replace(f"batch {trial.batch_size}  ", f"batch {trial.batch_size} ... ")
        + "\n"
    )


def test_the_status_line_says_trial_bracket_and_time_and_leaves_the_last_column_free(monkeypatch):
    terminal = write_to(monkeypatch, Terminal())
    status = reporter("auto", clock=iter([100, 100.2, 103, 112.5, 114]).__next__)
    status.started(64, Phase.GROW)
    assert terminal.screen == "oomprobe: grow  batch 64 ... | last good --, first failing -- | 0 s"
    status.finished(GOOD)
    assert terminal.screen == "oomprobe: grow  batch 64 fits | last good 64, first failing -- | 3 s"
    monkeypatch.setenv("COLUMNS", "40")
    status.started(128, Phase.GROW)
    assert terminal.screen == "oomprobe: grow  batch 128 ... | last good 64, first failing"[:39]
    monkeypatch.setenv("COLUMNS", "100")
    status.finished(BAD)
    assert (
        terminal.screen
        == "oomprobe: grow  batch 128 out of memory | last good 64, first failing 128 | 14 s"
    )
    status.close()
    assert terminal.screen == ""


@pytest.mark.parametrize(
    ("trials", "bracket"),
    [
        ([a_trial(9, Verdict.OOM), a_trial(7, Verdict.OOM), a_trial(8)], ["--", "7"]),
        ([a_trial(4), a_trial(8), a_trial(16, Verdict.OOM), a_trial(8, Verdict.OOM)], ["4", "8"]),
        ([a_trial(16, Verdict.OOM), a_trial(9, Verdict.OOM), a_trial(9)], ["9", "16"]),
    ],
    ids=[
        "a failure below a size that ran",
        "a size fails under the cap",
        "a size passes its recheck",
    ],
)
def test_the_bracket_follows_the_latest_verdict(monkeypatch, trials, bracket):
    terminal = write_to(monkeypatch, Terminal())
    status = reporter("auto")
    for trial in trials:
        status.finished(trial)
    status.started(1, Phase.CONFIRM)
    assert re.findall(r"--|\d+", terminal.screen.split("|")[1]) == bracket


@pytest.mark.parametrize(
    ("good", "bad", "options", "left"),
    [
        (64, 128, {}, 8),
        (64, 65, {}, 2),
        (64, 128, {"multiple_of": 8}, 5),
        (64, 128, {"resolution": 0.25}, 4),
    ],
)
def test_bisecting_says_how_many_trials_are_left(monkeypatch, good, bad, options, left):
    terminal = write_to(monkeypatch, Terminal())
    status = reporter("auto")
    status.opened("a device", Options(**options), False)
    status.finished(a_trial(good))
    status.finished(a_trial(bad, Verdict.OOM))
    assert "left" not in terminal.screen
    status.started(96, Phase.BISECT)
    assert re.findall(r"(\d+) trials? left", terminal.screen) == [str(left)]


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_force_color_colours_a_log_unless_no_color_is_set(monkeypatch, capsys, no_color, coloured):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("FORCE_COLOR", "1")
    play(reporter("auto"), GOOD, BAD)
    written = capsys.readouterr().err
    assert ("batch 64 ... \x1b[32mfits  " in written) == coloured
    assert ("batch 128 ... \x1b[31mout of memory  " in written) == coloured


@pytest.mark.parametrize(("progress", "written"), [("auto", True), ("plain", True), ("off", False)])
def test_without_a_terminal_plain_lines_go_to_stderr(capsys, progress, written):
    play(reporter(progress), GOOD, BAD)
    assert capsys.readouterr() == ("", (lines(GOOD) + lines(BAD)) * written)


def test_plain_lines_on_a_dumb_terminal_or_on_request(monkeypatch):
    terminal = write_to(monkeypatch, Terminal())
    play(reporter("plain"), GOOD)
    monkeypatch.setenv("TERM", "dumb")
    play(reporter("auto"), BAD)
    assert terminal.getvalue() == lines(GOOD) + lines(BAD)


def test_a_simulated_trial_is_a_line_written_after_it(capsys):
    status = reporter("plain")
    status.opened("a card", Options(), True)
    status.started(64, Phase.GROW)
    assert capsys.readouterr().err == "probing a card\n"
    play(status, GOOD)
    assert capsys.readouterr().err == f"{trial_line(GOOD)}\n"
    model, step = torch.nn.Linear(1, 1), lambda model, n: model(torch.ones(n, 1))
    result = oomprobe.check(model, step, 4, device="sim:1GiB", progress="plain")
    half, answer = map(trial_line, result.trials)
    assert capsys.readouterr().err == f"probing {result.device}\n{answer}\n{half}\n"


def test_a_line_that_no_verdict_ends_is_ended_when_the_probe_closes(capsys):
    status = reporter("plain")
    status.started(64, Phase.GROW)
    status.close()
    status.close()
    assert capsys.readouterr().err == "batch 64 ... \n"


class Cell(io.StringIO):
    """What ipykernel puts in the place of stderr."""

    __module__ = "ipykernel.iostream"


def test_in_a_notebook_one_output_is_updated_and_cleared(monkeypatch):
    def display(data, *, raw, display_id):
        shown.append(data["text/plain"])
        return types.SimpleNamespace(update=lambda data, raw: shown.append(data["text/plain"]))

    cell, shown = Cell(), []
    write_to(monkeypatch, cell)
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel does
    play(reporter("auto"), GOOD, BAD)
    words = ["64 ...", "64 fits", "128 ...", "128 out of memory"]
    assert [text.split(" | ")[0] for text in shown] == [
        "",
        *(f"oomprobe: grow  batch {one}" for one in words),
        "",
    ]
    assert cell.getvalue() == ""


def test_a_callable_gets_each_trial_once_and_may_raise(capsys):
    received = []
    play(reporter(received.append), GOOD, BAD)
    assert received == [GOOD, BAD]
    assert capsys.readouterr() == ("", "")
    with pytest.raises(TypeError):
        reporter(lambda: None).finished(GOOD)


class BrokenTerminal(Terminal):
    def write(self, text):
        raise BrokenPipeError


@pytest.mark.parametrize("stream", [None, BrokenTerminal()], ids=["missing", "broken"])
def test_a_broken_stderr_does_not_end_a_probe(monkeypatch, stream):
    write_to(monkeypatch, stream)
    for kind in ("auto", "plain"):
        play(reporter(kind), GOOD, BAD)


def test_an_unknown_value_is_refused():
    with pytest.raises(
        InvalidArgumentError, match="must be 'auto', 'plain', 'off' or a callable, not 'AUTO'"
    ):
        reporter("AUTO")


def test_the_log_names_the_size_before_its_step_runs(monkeypatch):
    def step(model, batch_size):
        assert raw.getvalue().decode().splitlines()[-1] == f"batch {batch_size} ... "
        torch.ones(batch_size)
        device.take(batch_size * MIB)

    raw, device = io.BytesIO(), LedgerDevice(8 * MIB)
    write_to(monkeypatch, io.TextIOWrapper(raw))
    result = oomprobe.find_max_batch(
        torch.nn.Linear(1, 1), step, device=device, memory_fraction=1.0, progress="plain"
    )
    assert raw.getvalue().decode() == "probing ledger\n" + "".join(map(lines, result.trials))


# --- on a pseudo-terminal ---


@pytest.fixture
def pseudo():
    """Yield a function that reads what a terminal of 60 columns received, and a file to write to it."""
    screen, end = os.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 60, 0, 0))

    def shown():
        text = b""
        while select.select([screen], [], [], 0.2)[0]:
            text += os.read(screen, 2**16)
        return text.decode()

    with os.fdopen(end, "w") as file:
        yield shown, file
    os.close(screen)
