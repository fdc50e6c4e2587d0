"""The command line: options, streams and the exit codes of whole commands."""

import argparse
import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import re
import shlex
import struct
import subprocess
import sys
import termios
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import a_result, a_trial

from oomprobe import cli, errors
from oomprobe.cli import given_options, parser
from oomprobe.records.options import Options

pytestmark = pytest.mark.usefixtures("warm_python")

TARGET = """
import os
import sys

import torch
from torch import nn

print("noise of the target")


def build(fail_at=None, bug=False):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, batch_size):
        print("noise of the step")
        os.write(1, b"noise from below\\n")
        if bug:
            raise KeyError("labels")
        if fail_at is not None and batch_size >= fail_at:
            torch.empty(2**50)
        optimizer.zero_grad()
        model(torch.randn(batch_size, 8)).sum().backward()
        optimizer.step()

    return model, step


def fits():
    return build()


def up_to_five():
    return build(fail_at=6)


def nothing():
    return build(fail_at=1)


def bug():
    return build(bug=True)


def on_cuda():
    return nn.Linear(2, 2).cuda(), None


def raises():
    raise LookupError("config of mine")


def step_leaves():
    model, step = fits()

    def leaving(model, batch_size):
        step(model, batch_size)
        if batch_size == 4:
            sys.exit(0)

    return model, leaving


def moves():
    os.chdir("/proc")
    return build()


def removes():
    os.rmdir(os.path.join(os.path.dirname(__file__), "removed"))
    return build()

"""
ISOLATED = ["--device", "cpu:1GiB", "--progress", "off"]
RUN = [*ISOLATED, "--in-process"]  # seconds faster; tests/workers covers child processes


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "train_target.py"
    path.write_text(TARGET)
    return str(path)


def run(capsys, *arguments):
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_an_answer(capsys, target, tmp_path):
    saved = tmp_path / "result.json"
    code, out, _ = run(capsys, "run", f"{target}:up_to_five", *ISOLATED, "--json", str(saved))
    assert code == 0
    workers = json.loads(saved.read_text())["environment"]["workers"]
    assert workers == "forked from a process that has made the imports"
    assert re.search(r"^verdict: batch (\d+)", out, re.MULTILINE)[1] == "5"
    assert "trials ran in separate processes: nothing in this process was changed" in out


def test_without_isolation_trials_run_here(capsys, target, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    code, _, err = run(capsys, "run", f"{target}:fits", "--require", "1", "--device", "sim:1GiB")
    assert (
        code,
        "note: trials can be isolated on Linux only; they run in this process" in err,
    ) == (0, True)


def test_paths_are_relative_to_where_the_command_started(capsys, target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [f"{target}:moves", "--max-batch", "4", "--global-batch", "16", "--world-size", "2"]
    assert run(capsys, "run", *arguments, "--json", "result.json", *RUN)[0] == 0
    code, out, _ = run(capsys, "show", str(tmp_path / "result.json"))
    assert code == 0
    assert "verdict: batch 4" in out
    assert "16 = 4 x 2 x 2, exact" in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["{}:nothing", *RUN], 1, "batch 1, the smallest allowed, does not fit"),
        (["no/such/file.py:build"], 2, "there is no file"),
        (["{}:bug"], 3, "raise KeyError(\"labels\")\nKeyError: 'labels'"),
        (["{}:bug", *RUN], 3, "raise KeyError(\"labels\")\nKeyError: 'labels'"),
        (["{}:raises", *RUN], 3, 'raise LookupError("config of mine")'),
        (["{}:fits", "--device", "cuda:7", "--in-process"], 4, "no device 'cuda:7' here"),
        (
            ["{}:on_cuda", *RUN],
            4,
            "needs a GPU, and this process sees none (AssertionError: Torch not compiled with",
        ),
        (["{}:up_to_five", "--require", "6", *RUN], 5, "batch 6 does not fit"),
        (["{}:fits", "--time-limit", "1e-9", *RUN], 6, "time passed"),
    ],
)
def test_exit_codes(capsys, target, arguments, code, said):
    arguments = [a.format(target) for a in arguments]
    options = [] if "--device" in arguments else ISOLATED
    got, out, err = run(capsys, "run", *arguments, *options, "--quiet")
    assert (got, out) == (code, "")
    assert said in err
    assert "in the trial's process" not in err
    assert "/oomprobe/runners/" not in err  # a traceback has the user's frames alone


def test_a_step_that_exits_is_3_with_the_table_so_far(capsys, target):
    code, out, err = run(capsys, "run", f"{target}:step_leaves", "--quiet", *RUN)
    assert (code, out) == (3, "")
    assert re.search(r"^\s+2\s+grow\s+fits", err, re.MULTILINE)
    assert "left the process, sys.exit(0)" in err


# --- options ---


def parsed(*arguments):
    return parser().parse_args(["run", "train:build", *arguments], argparse.Namespace(command=None))


VALUES = {
    "memory_fraction": 0.5,
    "resolution": 0.5,
    "breakdown": None,
    "host_memory": "64GiB",
}  # of flags: none
FLAGS = {
    option.name: [
        "--" + option.name.removesuffix("_s").replace("_", "-"),
        *map(str, filter(None, [VALUES.get(option.name, 4)])),
    ]
    for option in dataclasses.fields(Options)
}


def test_every_option_is_one_of_the_command_line():
    assert given_options(parsed()) == {"progress": "auto"}
    given = given_options(parsed(*itertools.chain(*FLAGS.values())))
    assert given == {"progress": "auto", **{name: VALUES.get(name, 4) or True for name in FLAGS}}


def test_values_of_an_axis_are_numbers_where_they_can_be():
    (values,) = given_options(parsed("--over", "length=512,0.5,short"))["over"].values()
    assert list(map(repr, values)) == ["512", "0.5", "'short'"]


COMMAND = ["--", "python", "train.py", "{batch}"]
WRONG = [
    ([], "  oomprobe run --help"),
    (["devcies"], "there is no command 'devcies'; did you mean devices?"),
    (["train.py:build"], "did you mean oomprobe run train.py:build?"),
    (["run", "--memory-fractoin", "0.8", "x:y"], "run: error: there is no option --memory-fractoin; did you mean --memory-fraction?"),
    (["show", "a.json", "--hmtl=a.html"], "RESULT.json\noomprobe show: error: there is no option --hmtl; did you mean --html?"),
    (["run", "x:y", "--tolerance", "2%"], "there is no option --tolerance here; oomprobe run --help says"),
    (["run", "train.py", "--batch-size", "{batch}"], "what is --batch-size {batch}? If it is part of a command"),
    (["run", "x:y", "--plot", "a.pgn"], "the plot a.pgn: let the name end in .png, .svg or .pdf"),
    (["run", "train.py"], "'train.py' is not a target"),
    (["run", "x:y", "--json", "/nonexistent/x.json"], "argument --json: '/nonexistent/x.json' cannot be written"),
    (["run", "x:y", "--world-size", "0"], "argument --world-size: must be an integer of at least 1, not 0"),
    (["run", "x:y", "--global-batch", "x"], "argument --global-batch: invalid int value: 'x'"),
    (["run", "x:y", "--nproc-per-node", "2", "--world-size", "4"], "so --world-size cannot be given too"),
    (["compare", "a.json", "b.json", "--tolerance", "2"], "a tolerance is a share of the memory, such as 2% or 0.02"),
    (["run", "x:y", "--over", "length"], "write --over as the argument of the step and its values"),
    (["run", "x:y", "--over", "size=(1,2)"], "tuples: only from Python"),
    (["run", "x:y", "--orders", "3"], "add --epoch NAME=FILE, or --tokens FILE"),
    (["run", "x:y", "--epoch", "length"], "write --epoch as arguments of the step and files"),
    (["run", "train.py:build", *COMMAND], "a target (train.py:build) and a command were given"),
    (["run"], "name what to probe"),
    # What the library refuses, with flags; tests/test_options.py has each text.
    (["run", "x:y", "--memory-fraction", "90"], "oomprobe: --memory-fraction must be above 0"),
    (["run", "x:y", "--time-limit", "0"], "oomprobe: --time-limit must be a positive number"),
    (["run", "x:y", "--min-batch", "9", "--max-batch", "8"], "--min-batch=9 is larger than --max-"),
    (["run", "x:y", "--require", "8", "--start-batch", "4"], "it would ignore --start-batch: "),
    (["run", "x:y", "--require", "20", "--multiple-of", "8"], "a multiple of --multiple-of=8"),
    (["run", "x:y", "--over", "a=1", "--over", "b=2"], "--over has 2 axes, a, b, and a table has"),
    (["run", "x:y", "--over", "a=1", "--over", "a=1,2"], "a must have at least one value, and each"),
    (["run", "x:y", "--over", "a=1", "--require", "4"], "--require=4 asks about one size, and --over"),
    (["run", "x:y", "--over", "a=1", "--device", "sim:T4,sim:L4"], "--over, --device make a table"),
    (["run", "x:y", "--over", "a=1", "--savings", "all"], "--over, --savings make a table each"),
    (["run", "x:y", "--savings", "al"], "there is no saving 'al'"),
    (["run", "x:y", "--nproc-per-node", "2", "--in-process"], "of their own: leave out --in-process"),
    (["run", "x:y", "--nproc-per-node", "2", "--device", "cuda:0"], "oomprobe: --device 'cuda:0' cannot be given for several ranks"),
    (["run", "x:y", "--passes-after", "3", "--keep-writes"], "--passes-after, --keep-writes can be"),
    (["run", "--in-process", *COMMAND], "--in-process cannot be given for a command"),
    (["run", "--device", "sim:T4,sim:L4", *COMMAND], "name one as --device, such as 'sim:RTX-4090'"),
    (["run", "--device", "cuda", *COMMAND], "oomprobe: --device 'cuda' cannot be given for a command"),
    (["run", "--savings", "all", *COMMAND], "can be given expandable_segments alone"),
]  # fmt: skip
IN_A_NEW_PROCESS = f"""
import sys
from oomprobe.cli import main
for arguments, _ in {WRONG}:
    try:
        print(main(arguments))
    except SystemExit as left:
        print(left.code)
print("torch" in sys.modules)
"""


def test_usage_errors_are_2_without_torch():
    done = subprocess.run(
        [sys.executable, "-c", IN_A_NEW_PROCESS], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["2"] * len(WRONG) + ["False"]
    for _, said in WRONG:
        assert said in done.stderr


def test_an_option_is_named_as_it_was_typed(capsys, tmp_path):
    (tmp_path / "lengths.txt").write_text("12\n30\n")
    (tmp_path / "wrong.py").write_text(
        "import oomprobe\nbuild = lambda: oomprobe.worst_case_batches([1], scan_s=-1)\n"
    )
    tokens = ["--tokens", str(tmp_path / "lengths.txt")]
    assert "oomprobe: --tokens cannot be given" in run(capsys, "run", *tokens, *COMMAND)[2]
    assert "more than --max-batch=8:" in run(capsys, "run", "x:y", *tokens, "--max-batch", "8")[2]
    of_a_function = run(capsys, "run", f"{tmp_path}/wrong.py:build", "--device", "sim:1GiB")[2]
    assert "oomprobe: scan_s must be a number of seconds" in of_a_function


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ["t:b", "--nproc-per-node", "gpu"],
            4,
            "accelerator each, and this machine shows 0 accelerators",
        ),
        (["--", "true"], 2, "does not use the batch size"),
    ],
)
def test_usage_errors_that_torch_decides(capsys, arguments, code, said):
    assert cli.main(["run", *arguments]) == code
    assert said in capsys.readouterr().err


def test_a_table_of_cards_exits_by_whether_a_card_runs_the_size(capsys, target):
    def of_cards(*more, devices="sim:24GiB,sim:64MiB"):
        return run(
            capsys,
            "run",
            f"{target}:fits",
            "--device",
            devices,
            "--max-batch",
            "9",
            "--quiet",
            *more,
        )[:2]

    assert of_cards("--require", "5", "--global-batch", "18") == (0, "sim:64MiB\n")
    assert of_cards("--require", "500") == (5, "")
    assert of_cards() == (0, "sim:24GiB 9\nsim:64MiB 9\n")
    assert of_cards(devices="sim:1MiB,sim:2MiB")[0] == 1


def test_growth_above_the_tolerance_is_5(capsys, tmp_path):
    paths = [str(tmp_path / name) for name in ("before.json", "after.json")]
    for path, peak_bytes in zip(paths, (100, 102), strict=True):
        when = {"date": f"2026-01-01T00:{peak_bytes - 100:02}:00+00:00", "torch": "2.13.0"}
        trials = (a_trial(4, peak_allocated_bytes=peak_bytes),)
        a_result(trials=trials, environment=when).to_json(path)
    assert run(capsys, "compare", *paths, "--tolerance", "2%")[0] == 0
    code, out, _ = run(capsys, "compare", *paths, "--tolerance", "1%")
    assert code == 5
    assert "  - memory grew: batch 4 allocates 102 B, 2.0 % more than 100 B" in out
    code, out, _ = run(capsys, "compare", *paths)
    assert (code, "other differences" in out) == (0, False)  # two results have two dates


def test_a_file_that_cannot_be_written_loses_no_answer(capsys, target, tmp_path):
    (tmp_path / "removed").mkdir()
    arguments = [
        "--max-batch",
        "4",
        "--quiet",
        "--json",
        str(tmp_path / "removed" / "x.json"),
        *RUN,
    ]
    code, out, err = run(capsys, "run", f"{target}:removes", *arguments)
    assert (code, out) == (2, "4\n")
    assert "cannot be written" in err


def test_each_file_that_is_written_is_named(capsys, target, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    checked = ["run", f"{target}:fits", "--require", "4", *RUN]
    code, out, err = run(
        capsys, *checked, "--json", "a.json", "--html", "a.html", "--plot", "a.png"
    )
    assert code == 0
    assert {path.name for path in tmp_path.glob("a.*")} == {"a.html", "a.json", "a.png"}
    assert [line for line in err.splitlines() if "wrote" in line] == [
        "wrote a.json",
        "wrote a.html",
        "wrote a.png",
    ]
    assert "wrote" not in out
    assert "wrote" not in run(capsys, *checked, "--json", "b.json", "--quiet")[2]
    code, out, err = run(capsys, "show", "a.json", "--plot", str(tmp_path.parent / "b.svg"))
    assert (code, err) == (0, f"wrote {tmp_path.parent}/b.svg\n")


def test_help_of_run_has_groups_examples_and_each_exit_status(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["run", "--help"])
    shown = capsys.readouterr().out
    assert left.value.code == 0
    assert re.findall(r"^([a-z ]+):$", shown, re.MULTILINE)[2:] == [
        *("search", "memory", "where", "output", "examples", "exit statuses")
    ]
    assert [int(status) for status in re.findall(r"^ {2,4}(\d+)  ", shown, re.MULTILINE)] == [
        *errors.EXIT_STATUSES
    ]


# --- streams ---


@pytest.mark.parametrize(("name", "code"), [("fits", 0), ("bug", 3)])
def test_only_the_answer_goes_to_stdout_which_is_then_restored(capfd, target, name, code):
    before = sys.stdout
    got, out, err = run(capfd, "run", f"{target}:{name}", "--max-batch", "4", "--json", "-", *RUN)
    assert got == code
    assert (json.loads(out)["batch_size"] == 4) if code == 0 else (out == "")
    assert {"noise of the step", "noise from below"} <= set(err.splitlines())
    assert sys.stdout is before
    os.write(1, b"on stdout\n")
    assert capfd.readouterr().out == "on stdout\n"


IN_A_PROCESS = """
import atexit, os, sys
from oomprobe.cli import main
atexit.register(lambda: print("goodbye"))
atexit.register(lambda: os.write(1, b"goodbye from below"))
sys.exit(main())
"""


def test_stdout_of_a_process_holds_only_the_answer_though_stderr_is_closed():
    words = ["run", "--memory-fraction", "1", "--require", "4", "--quiet", "--", "true", "{batch}"]
    command = shlex.join([sys.executable, "-c", IN_A_PROCESS, *words])
    assert (
        subprocess.run(
            f"{command} 2>&-", shell=True, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        == "4\n"
    )


def test_a_reader_that_exits_early_is_no_error(tmp_path):
    a_result().to_json(tmp_path / "result.json")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        command = [sys.executable, "-m", "oomprobe", "show", str(tmp_path / "result.json")]
        done = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")


# --- other commands ---


@pytest.mark.parametrize("text", ["not json", "{}", "3"])
def test_show_refuses_what_is_not_a_result(capsys, tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    code, out, err = run(capsys, "show", str(path))
    assert (code, out) == (2, "")
    assert err.startswith("oomprobe: ")


def test_devices_lists_the_host_and_simulated_cards(capsys):
    code, out, _ = run(capsys, "devices")
    assert code == 0
    real, simulated = out.split("\n\n")
    assert real.splitlines()[-1].startswith("cpu  host memory")
    assert len(re.findall(r"^sim:\S+ +\d+\.\d\d GiB of", simulated, re.MULTILINE)) >= 20


def test_demo_probes_two_models_in_45_lines(capsys, monkeypatch):
    monkeypatch.setattr(cli, "DEMO_BUDGET", "cpu:64MiB")
    code, out, err = run(capsys, "demo", "--progress", "off")
    assert code == 0, err
    answers = [int(n) for n in re.findall(r"^verdict: batch (\d+)", out, re.MULTILINE)]
    assert len([n for n in answers if n > 1]) == 2
    assert len(out.splitlines()) <= 45
    assert max(map(len, out.splitlines())) <= 100


def test_quiet_tells_that_nothing_was_trained(capsys, tmp_path):
    (tmp_path / "forward.py").write_text(
        "import torch\nbuild = lambda: (torch.nn.Linear(8, 8), lambda model, n: model(torch.randn(n, 8)).square().mean())\n"
    )
    arguments = [f"{tmp_path}/forward.py:build", "--device", "sim:1GiB", "--max-batch", "4"]
    code, out, err = run(capsys, "run", *arguments, "--quiet")
    assert (code, out) == (0, "4\n")
    assert "oomprobe: weak: no optimizer stepped in" in err
    assert "no gradient was left" in err


def test_quiet_does_not_print_a_contaminated_answer(capsys, monkeypatch):
    monkeypatch.setattr("oomprobe.probe.probe_target", lambda *_, **__: a_result(contaminated=True))
    code, out, err = run(capsys, "run", "train:build", "--quiet")
    assert (code, out) == (6, "")
    assert "no number printed" in err
    assert run(capsys, "run", "train:build")[0] == 0


@pytest.mark.parametrize("across", [80, 60, 200])
@pytest.mark.parametrize("command", ["show --verbose A.json", "compare A.json B.json"])
def test_a_report_fits_the_terminal(tmp_path, monkeypatch, capfd, command, across):
    """It has the same words as in a pipe, and breaks no line between words but those of tables."""
    monkeypatch.chdir(tmp_path)
    long = "a note of many words that no terminal shows in one line, " * 3
    a_result(notes=(long,)).to_json("A.json")
    a_result(environment={"command": long}).to_json("B.json")
    assert cli.main(command.split()) == 0
    piped = capfd.readouterr().out
    screen, end = os.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 20, across, 0, 0))
    with os.fdopen(end, "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        reader = ThreadPoolExecutor().submit(read_all, screen)
        assert cli.main(command.split()) == 0
    shown = reader.result()
    assert shown.split() == piped.split()
    assert max(map(len, shown.splitlines())) <= max(across, 76)
    assert (shown == piped) is (across == 200)


def read_all(screen):
    text = b""
    with (
        contextlib.suppress(OSError),
        os.fdopen(screen, "rb", buffering=0) as file,
    ):  # its other end has closed
        while part := file.read(2**16):
            text += part
    return text.decode().replace("\r\n", "\n")
