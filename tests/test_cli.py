"""The command line: streams and exit codes."""

import json
import re
import signal
import subprocess
import sys
import textwrap

import pytest

from oomprobe import ProbeResult, cli

TARGET = """
import torch
from torch import nn

print("noise of the target")


def build(fail_at=None, bug=False):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, batch_size):
        print("noise of the step")
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


def not_a_pair():
    return 3
"""
RUN = ["--device", "cpu:1GiB", "--progress", "off"]


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "train_target.py"
    path.write_text(TARGET)
    return str(path)


def run(capsys, *arguments):
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_an_answer(capsys, target):
    code, out, err = run(capsys, "run", f"{target}:up_to_five", *RUN)
    assert code == 0
    assert re.search(r"^verdict: batch (\d+)", out, re.MULTILINE)[1] == "5"
    assert "isolated trials are not in this version yet" in err
    assert "not in this version" not in run(capsys, "run", f"{target}:up_to_five", "--in-process", *RUN)[2]


def test_quiet_leaves_the_integer_alone_on_stdout(capsys, target):
    code, out, err = run(capsys, "run", f"{target}:up_to_five", "--quiet", *RUN)
    assert (code, out) == (0, "5\n")
    assert "verdict: batch 5" in err
    assert "noise of the step" in err


def test_json_to_stdout_and_to_a_file(capsys, target, tmp_path):
    code, out, _ = run(capsys, "run", f"{target}:fits", "--max-batch", "4", "--json", "-", *RUN)
    assert code == 0
    assert ProbeResult.from_dict(json.loads(out)).batch_size == 4
    path = tmp_path / "result.json"
    run(capsys, "run", f"{target}:fits", "--max-batch", "4", "--json", str(path), *RUN)
    code, out, _ = run(capsys, "show", str(path))
    assert code == 0
    assert "verdict: batch 4" in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["{}:nothing"], 1, "batch 1, the smallest allowed, does not fit"),
        (["{}:fits", "--min-batch", "0"], 2, "min_batch must be an integer of at least 1, not 0"),
        (["{}:not_a_pair"], 2, "not a pair (model, step_fn)"),
        (["{}:missing"], 2, "has no function 'missing'"),
        (["no/such/file.py:build"], 2, "there is no file"),
        (["{}:fits", "--journal", "x"], 2, "journal is not in this version yet"),
        (["{}:bug"], 3, "KeyError: 'labels'"),
        (["{}:fits", "--device", "cuda:7"], 4, "no device 'cuda:7' here"),
        (["{}:fits", "--device", "sim:24GiB"], 4, "not in this version yet"),
        (["{}:up_to_five", "--require", "6"], 5, "does not fit"),
        (["{}:fits", "--time-limit", "1e-9"], 6, "time passed"),
    ],
)
def test_exit_codes(capsys, target, arguments, code, said):
    arguments = [a.format(target) for a in arguments]
    options = [] if "--device" in arguments else ["--device", "cpu:1GiB"]
    got, out, err = run(capsys, "run", *arguments, *options, "--progress", "off", "--quiet")
    assert (got, out) == (code, "")
    assert said in err


def test_require_that_survives(capsys, target):
    assert run(capsys, "run", f"{target}:up_to_five", "--require", "5", "--quiet", *RUN)[:2] == (0, "5\n")


def test_a_plan_for_several_ranks(capsys, target):
    code, out, _ = run(capsys, "run", f"{target}:up_to_five", "--global-batch", "40", "--world-size", "2", *RUN)
    assert code == 0
    assert re.search(r"40 = 5 x 4 .*exact", out), out


def test_usage_errors_are_argparse_s(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["run"])
    assert stopped.value.code == 2
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert "oomprobe 0." in capsys.readouterr().out


@pytest.mark.parametrize("text", ["not json", "[1]", '{"schema_version": 99}', "{}"])
def test_show_refuses_what_is_not_a_result(capsys, tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    code, out, err = run(capsys, "show", str(path))
    assert (code, out) == (2, "")
    assert err.startswith("oomprobe: ")


def test_devices_lists_the_host(capsys):
    code, out, _ = run(capsys, "devices")
    assert code == 0
    assert out.splitlines()[-1].startswith("cpu  host memory")


def test_ctrl_c_gives_130_and_the_table_so_far(target, tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text(
        textwrap.dedent("""
            import sys, time, torch
            def build():
                model = torch.nn.Linear(2, 2)
                def step(model, batch_size):
                    model(torch.randn(batch_size, 2)).sum().backward()
                    if batch_size == 4:
                        sys.stderr.write("ready\\n"); sys.stderr.flush()
                        time.sleep(60)
                return model, step
        """)
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "oomprobe", "run", f"{slow}:build", "--device", "cpu:1GiB", "--progress", "off"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.stderr.readline() != "ready\n":
        pass
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "trials so far" in err
    assert re.search(r"^\s+2\s+grow\s+fits", err, re.MULTILINE)


@pytest.mark.slow
def test_demo_runs_two_real_models(capsys):
    code, out, err = run(capsys, "demo", "--progress", "off")
    assert code == 0, err
    answers = [int(n) for n in re.findall(r"^verdict: batch (\d+)", out, re.MULTILINE)]
    assert len(answers) == 2
    assert all(n > 1 for n in answers)
    assert out.count("restored and compared bit for bit: identical") == 2
