"""The module that runs at the start of the command's Python, on torch without a GPU."""

import ast
import os
import subprocess
import sys
import textwrap

import pytest

from oomprobe.runners.command.reports import RunReports
from oomprobe.runners.command.run import HERE

pytestmark = pytest.mark.usefixtures("warm_python")
SITE, PYTHON = HERE / "site", sys.executable
TRAINS = """
    import os, sys, torch
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


def run(tmp_path, code, *, path=(), python=None, **variables):
    """Run a program, by the warm Python unless another is given, and return its exit status, its stderr and the reports."""
    reports = tmp_path / "reports"
    reports.mkdir(exist_ok=True)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [SITE, *path])),
        "OOMPROBE_REPORTS": str(reports),
    }
    ended = subprocess.run(
        [python or sys.executable, script],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stderr, RunReports.read(reports).reports


def test_steps_are_reported(tmp_path):
    """Of a program that looks for torch before it imports it, and which has two optimizers."""
    looks = "    from importlib.util import find_spec\n    assert find_spec('torch') and find_spec('torch')\n"
    another = "    other = torch.optim.SGD(model.parameters(), lr=0.1)\n    for _ in range(5): other.step()\n"
    status, stderr, (report,) = run(tmp_path, looks + TRAINS + another)
    assert (status, stderr) == (0, "")
    assert (report.why, report.steps, report.ooms, report.errors, report.devices) == (
        "exit",
        5,
        0,
        (),
        (),
    )
    assert report.begun_s <= report.step_s[0] <= report.step_s[1] <= report.at_s


BY_HAND = """
    import torch
    weight = torch.ones(4, requires_grad=True)
    def train(steps):
        for _ in range(steps):
            weight.square().sum().backward()
            weight.data.sub_(weight.grad)
    def optimizer():
        return torch.optim.SGD([weight], lr=0.1)
"""


@pytest.mark.parametrize(
    ("code", "steps"),
    [
        ("train(9)", 6),
        ("its = optimizer(); train(9); its.step()", 1),
        ("train(9); its = optimizer(); its.step(); train(9); its.step()", 2),
    ],
)
def test_backward_passes_are_steps_where_the_program_has_no_optimizer(tmp_path, code, steps):
    status, stderr, (report,) = run(tmp_path, f"{BY_HAND}    {code}\n")
    assert (status, stderr, report.steps) == (0, "", steps)
    said = "has no optimizer of torch's: each of its backward passes was counted as a step"
    assert any(said in note for note in report.notes) == ("its" not in code)


def test_processes_that_write_no_report_at_their_end_have_written_one_at_their_last_step(tmp_path):
    """A forked child counts for itself."""
    code = (
        TRAINS
        + "    if not os.fork():\n        optimizer.step()\n        os._exit(0)\n    os.wait()\n    os.kill(os.getpid(), 9)\n"
    )
    assert sorted((report.why, report.steps) for report in run(tmp_path, code)[2]) == [
        ("step", 1),
        ("step", 5),
    ]


def test_the_exception_that_ends_the_program(tmp_path):
    """The sitecustomize that oomprobe's hides is broken, which breaks no more than without oomprobe."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("raise ValueError('theirs')\n")
    code = (
        TRAINS
        + "    try: {}['a']\n    except KeyError as error: raise RuntimeError('no column') from error\n"
    )
    status, stderr, (report,) = run(tmp_path, code, path=[tmp_path / "own"])
    assert (status, report.steps) == (1, 5)
    assert all(said in stderr for said in ("Error in sitecustomize", "theirs", "no column"))
    assert [(link.classes[0], link.text) for link in report.errors] == [
        ("builtins.RuntimeError", "no column"),
        ("builtins.KeyError", "'a'"),
    ]
    assert report.where == "script.py:9"


@pytest.mark.parametrize(
    ("around", "raised"),
    [
        ("contextlib.suppress(RuntimeError)", 1),
        ("torch._guards.tracing(torch._guards.TracingContext(None))", 0),
    ],
    ids=["script", "compiler"],  # which tries kernels, and handles what they raise
)
def test_an_out_of_memory_error_that_is_caught(tmp_path, around, raised):
    code = f"""
        import contextlib, os, torch
        if not os.fork():
            with contextlib.suppress(RuntimeError), {around}:
                raise torch.OutOfMemoryError("CUDA out of memory")
            os._exit(0)
        os.wait()
    """
    child, parent = run(tmp_path, code)[2]
    assert (child.raised_ooms, child.why, child.where) == (raised, "oom", "script.py:5")
    assert (parent.raised_ooms, parent.why) == (0, "exit")


def test_a_compiled_optimizer(tmp_path):
    code = (
        TRAINS.replace("optimizer = ", "whole = ")
        .replace("optimizer.step()", "step()")
        .replace("for _ in", "step = torch.compile(whole.step, backend='eager')\n    for _ in")
    )
    status, stderr, (report,) = run(tmp_path, code)
    assert (status, report.steps) == (0, 5), stderr


def test_nothing_of_it_fails_a_program(tmp_path):
    variables = {"OOMPROBE_REPORTS": "/nowhere", "OOMPROBE_FRACTIONS": "no json"}
    assert run(tmp_path, TRAINS, **variables)[:2] == (0, "")


def test_a_program_without_torch_has_its_own_sitecustomize_and_gets_no_torch(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("OWN = True")
    code = "import sys; assert sys.modules['sitecustomize'].OWN and not {'torch', 'json'} & {*sys.modules}"
    assert run(tmp_path, code, path=[tmp_path / "own"], python=PYTHON) == (0, "", [])


def test_it_is_python_3_8():
    ast.parse((SITE / "sitecustomize.py").read_text(), feature_version=(3, 8))
