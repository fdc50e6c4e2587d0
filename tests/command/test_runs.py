"""Commands without torch: what they are given, how they are ended, and what is refused."""

import json
import os
import signal
import sys
import tempfile
import textwrap
import time
import warnings
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from processes import ChildDiedError, running, start, until

import oomprobe
from oomprobe.cli import main
from oomprobe.devices import choose
from oomprobe.records.patience import Patience
from oomprobe.verdicts import Link

from .test_reports import memory, report

KEY_ERROR = Link(classes=("builtins.KeyError",), text="x")
SITE = Path(oomprobe.__file__).parent / "runners/command/site"
SECONDS = str(600 + os.getpid() / 1e7)  # that the tests' processes sleep: a mark


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert not running(SECONDS)


def shell(script, *words):
    return ["sh", "-c", script, *(words or ["{batch}"])]


def check(command, size=8, **options):
    return oomprobe.check_command(command, size, memory_fraction=1.0, progress="off", **options)


def test_what_a_command_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://the-teams-server")
    script = f'echo "$0 $1 $2 $OOMPROBE_BATCH" > {tmp_path}/words; env > {tmp_path}/env; touch "$1/x"; stat -c %a "$1/.." > {tmp_path}/mode; test ! -t 0'
    before = {**os.environ}
    check(shell(script, "{batch}x{batch}", "{dir}", "lr={batch_size}"))
    assert os.environ == before
    first, folder, untouched, variable = (tmp_path / "words").read_text().split()
    assert (first, untouched, variable) == ("8x8", "lr={batch_size}", "8")
    assert not Path(folder).parent.exists()
    assert (tmp_path / "mode").read_text() == "700\n"
    variables = dict(
        line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line
    )
    assert variables["PYTHONPATH"].startswith(str(SITE))
    assert variables["WANDB_MODE"] == "offline"
    assert variables["MLFLOW_TRACKING_URI"] == f"file:{folder}"


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        (["true"], {}, "put {batch} where its number stands"),
        (
            ["no-such-program", "{batch}"],
            {},
            "no-such-program is not a program that can be run: check its name",
        ),
        (["python train.py {batch}"], {}, "leave out the quotes around the whole command"),
        (["CUDA_VISIBLE_DEVICES=1", "true", "{batch}"], {}, "begin with env"),
        (["--steps", "3", "true", "{batch}"], {}, "options of oomprobe stand before"),
        ("true {batch}", {}, "must be a list of strings"),
        (
            ["true", "{batch}"],
            {"start_batch": 8, "max_batch": 4},
            "start_batch=8 is not between min_batch=1 and max_",
        ),
    ],
)
def test_refused_before_anything_runs(command, options, said):
    with pytest.raises(oomprobe.InvalidArgumentError, match=said):
        oomprobe.probe_command(command, **options)


@pytest.mark.parametrize(
    ("exists", "options", "warns"),
    [(False, {}, True), (True, {}, False), (False, {"device": "sim:1GiB"}, False)],
)
def test_a_machine_without_a_gpu_is_named_before_the_first_trial(
    tmp_path, monkeypatch, exists, options, warns
):
    monkeypatch.setattr(choose, "DRIVERS", [str(tmp_path)] if exists else [])
    monkeypatch.setattr(choose, "current_accelerator", lambda: None)
    told = []  # before each trial
    asked = {**options, "progress": lambda trial: told.append(len(caught))}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(oomprobe.OomProbeError):
            oomprobe.check_command(["true", "{batch}"], 8, memory_fraction=1.0, **asked)
    texts = [str(one.message) for one in caught]
    assert [text.startswith("no GPU is in sight on this machine") for text in texts] == [
        True
    ] * warns
    assert not told or set(told) == {int(warns)}


def test_a_file_that_reads_the_variable(tmp_path):
    (tmp_path / "train.sh").write_text('test "$OOMPROBE_BATCH" -le 100\n')
    check(["sh", str(tmp_path / "train.sh")])


def test_command_line(capfd, tmp_path):
    where = tmp_path / "result.json"
    command = shell('test "$0" -le 100')
    options = ["--memory-fraction", "1", "--quiet", "--json", str(where)]
    assert main(["run", *options, "--require", "100", "--", *command]) == 0
    printed = capfd.readouterr()
    assert printed.out == "100\n"
    assert printed.err.startswith("oomprobe: weak: no process reported")
    result = oomprobe.ProbeResult.from_dict(json.loads(where.read_text()))
    assert result.environment["command"].startswith("sh -c")
    assert str(result).startswith("verdict: batch 100 ran; no process reported its memory")
    assert main(["run", *options, "--require", "101", "--", *command]) == 3


def test_a_margin_needs_reports():
    with pytest.raises(
        oomprobe.UnreliableError, match=r"memory_fraction=0.9 cannot be promised: at batch 1, no"
    ):
        oomprobe.probe_command(["true", "{batch}"], progress="off")


def test_a_failing_command_shows_its_last_lines():
    with pytest.raises(oomprobe.StepFailedError) as caught:
        check(shell("echo loading; echo \"KeyError: 'input_ids'\"; exit 1"))
    assert str(caught.value).splitlines()[-2:] == ["loading", "KeyError: 'input_ids'"]


def test_a_port_in_use_is_tried_again(tmp_path):
    first_fails = f'mkdir {tmp_path}/tried || exit 0; echo "RuntimeError: EADDRINUSE, address already in use"; exit 1'
    assert check(shell(first_fails)).batch_size == 8


@pytest.mark.parametrize(
    "script",
    [
        "setsid sleep SECONDS & exec sleep SECONDS",
        "(env -i setsid sh -c 'sleep SECONDS & sleep SECONDS' &) ; sleep SECONDS",
    ],
)
def test_nothing_is_left(script):
    result = check(shell(script.replace("SECONDS", SECONDS)), passes_after_s=0.3)
    assert result.batch_size == 8
    assert any(note.startswith("weak: ") and "had run for 300 ms" in note for note in result.notes)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 143),
        (signal.SIGKILL, None),
    ],
)
def test_nothing_is_left_when_oomprobe_ends(sent, status, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    command = shell(f"env -i setsid sleep {SECONDS} & sleep {SECONDS}")
    oomprobe_itself = start(
        main, ["run", "--memory-fraction", "1", "--progress", "off", "--", *command]
    )
    until(lambda: len(running(SECONDS)) >= 2)
    oomprobe_itself.kill(sent)
    with pytest.raises(ChildDiedError) if status is None else nullcontext():
        assert oomprobe_itself.result() == status
    until(lambda: not running(SECONDS) and not list(tmp_path.iterdir()), within_s=10)


def test_a_quoted_error_is_no_pass_by_seconds():
    line = "skipped a batch: CUDA out of memory. Tried to allocate 2.00 GiB"
    with pytest.raises(oomprobe.NothingFitsError, match=line):
        check(shell(f"echo '{line}'; sleep {SECONDS}"), passes_after_s=0.3)


@pytest.mark.parametrize(
    ("reported", "error", "said"),
    [
        (
            report(0, memory(), world=2, steps=9),
            oomprobe.UnreliableError,
            "1 of 2 ranks reported their steps; 1 did not",
        ),
        (
            replace(report(0, memory()), errors=(KEY_ERROR,)),
            oomprobe.StepFailedError,
            "rank 0: KeyError: x",
        ),
        (
            replace(report(0, memory(), why="oom"), ooms=1),
            oomprobe.NothingFitsError,
            "its allocator ran out of memory",
        ),
    ],
    ids=["ranks that do not report", "an error", "memory that torch gets elsewhere"],
)
def test_a_command_that_hangs_is_not_waited_for_long(tmp_path, reported, error, said):
    (tmp_path / "report").write_text(json.dumps(asdict(reported)))
    hangs = f'cp {tmp_path}/report "$OOMPROBE_REPORTS/a.json"; sleep {SECONDS}'
    with pytest.raises(error, match=said):
        check(
            shell(hangs),
            patience=Patience(failed_s=0.3, handling_s=0.3, missing_s=0.3),
            time_limit_s=30,
        )


@pytest.mark.parametrize(("largest", "is_refused"), [(15, False), (16, True)])
def test_sizes_that_come_to_the_same(tmp_path, largest, is_refused):
    """A script may round the batch size, but not ignore it."""
    same = report(0, memory(requested=((100, 5), (150, 8), (190, 12))))
    (tmp_path / "report").write_text(json.dumps(asdict(same)))
    command = shell(f'cp {tmp_path}/report "$OOMPROBE_REPORTS/a.json"')
    options = {"min_batch": 8, "max_batch": largest, "memory_fraction": 1.0, "progress": "off"}
    with (
        pytest.raises(oomprobe.UnreliableError, match="as batch 8") if is_refused else nullcontext()
    ):
        assert oomprobe.probe_command(command, **options).batch_size == largest


def test_a_hang_ends_at_the_limit_and_a_deaf_process_is_killed(tmp_path):
    (tmp_path / "report").write_text(json.dumps(asdict(report(0, memory(), steps=1))))
    deaf = f'cp {tmp_path}/report "$OOMPROBE_REPORTS/a.json"; trap "" TERM; sleep {SECONDS}; sleep {SECONDS}'
    with pytest.raises(oomprobe.TimeLimitError) as caught:
        oomprobe.probe_command(
            shell(deaf), memory_fraction=1.0, trial_time_limit_s=1, progress="off"
        )
    assert "had made 1 step" in caught.value.trials[0].error


def test_a_command_that_only_starts_others_is_refused():
    with pytest.raises(oomprobe.UnreliableError, match="programs that it had started still ran"):
        check(shell(f"sleep {SECONDS} &"))


def test_srun_is_given_time(tmp_path):
    """Slurm's launcher ends the processes on other machines when it is terminated."""
    srun = tmp_path / "srun"
    srun.symlink_to(sys.executable)
    code = f"""
        import pathlib, signal, sys, time
        def end(*_):
            time.sleep(2.5)
            pathlib.Path({str(tmp_path)!r}, "ended").touch()
            sys.exit()
        signal.signal(signal.SIGTERM, end)
        print("CUDA out of memory. Tried to allocate", flush=True)
        time.sleep(60)
    """
    command, began_s = [str(srun), "-c", textwrap.dedent(code), "{batch}"], time.monotonic()
    with pytest.raises(oomprobe.NothingFitsError):
        oomprobe.probe_command(
            command, memory_fraction=1.0, passes_after_s=0.5, keep_writes=True, progress="off"
        )
    assert (tmp_path / "ended").exists()
    assert time.monotonic() - began_s < 15


def test_a_killed_keeper_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(oomprobe.UnreliableError, match="its keeper was killed"):
        check(shell(f"kill -9 $PPID; sleep {SECONDS}"))
    assert not list(tmp_path.iterdir())


def test_a_flood_of_output_is_read():
    began_s = time.monotonic()
    check([sys.executable, "-c", "[print('y' * 99) for _ in range(10**5)]", "{batch}"])
    assert time.monotonic() - began_s < 30
