"""The pytest fixture `max_batch`, in tests of its own that pytest runs in a process."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

pytestmark = pytest.mark.usefixtures("warm_python")

TESTS = """
import pytest, torch
from oomprobe.records.patience import Patience

def make(width):
    model = torch.nn.Linear(width, 1024)
    optimizer = torch.optim.SGD(model.parameters())

    def step(model, batch_size):
        optimizer.zero_grad()
        model(torch.randn(batch_size, width)).square().mean().backward()
        optimizer.step()

    return model, step

def checked(max_batch, width=1024):
    few = Patience(look_calls=3)
    return max_batch.check(*make(width), 64, device="sim:1GiB", confirm_steps=2, patience=few)

def test_same(max_batch):
    checked(max_batch).assert_no_growth()
    small = checked(max_batch, 8)
    small.assert_no_growth()
    small.assert_peak_below("1GiB")

def test_grown(max_batch):
    checked(max_batch, WIDER).assert_no_growth("2%")

@pytest.mark.parametrize("tolerance", [None, "2%"])
def test_torch(max_batch, tolerance):
    checked(max_batch).assert_no_growth(tolerance)

def test_new(max_batch):
    checked(max_batch).assert_no_growth()

def test_large(max_batch):
    checked(max_batch).assert_peak_below("10MiB")
"""


@pytest.fixture
def run(tmp_path):
    """Run the tests, and return the text of each that failed, by its name."""

    def run(*arguments, wider):
        (tmp_path / "test_memory.py").write_text(TESTS.replace("WIDER", str(wider)))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "oomprobe.integrations.pytest",
            "-p",
            "no:cacheprovider",
        ]
        environment = {
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": os.getcwd(),
        }
        ended = subprocess.run(
            [*command, *arguments, "test_memory.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        _, *failed = ended.stdout.partition("short test summary")[0].split("\n____")
        return {text.split()[1]: text for text in failed}

    return run


def test_baselines_are_written_and_guard_the_memory(run, tmp_path):
    assert [*run("--oomprobe-update", wider=1024)] == ["test_large"]
    folder = tmp_path / "test_memory.oomprobe"
    names = ["test_same-2.json", "test_same.json", "test_torch-2-.json", "test_torch-None-.json"]
    assert sorted(path.name for path in folder.glob("test_[st]*")) == names
    (folder / "test_new.json").unlink()
    for path in folder.glob("test_torch*"):
        data = json.loads(path.read_text())
        path.write_text(
            json.dumps({**data, "environment": {**data["environment"], "torch": "1.0"}})
        )

    failed = run(wider=1200)
    assert [*failed] == ["test_grown", "test_torch[None]", "test_new", "test_large"]
    assert "memory grew: batch 64 allocates" in failed["test_grown"]
    assert "by module: (the model itself) (Linear) +" in failed["test_grown"]
    assert "is of torch 1.0, and this is" in failed["test_torch[None]"]
    assert "run pytest --oomprobe-update" in failed["test_new"]
    assert "not less than 10.00 MiB" in failed["test_large"]
    assert "where the memory went: batch 64" in failed["test_large"]
    assert not any(
        "oomprobe/" in text.replace("--oomprobe", "").replace(".oomprobe/", "")
        for text in failed.values()
    )


def test_loading_the_plugin_does_not_import_torch():
    [own] = [one for one in entry_points(group="pytest11") if one.name == "oomprobe"]
    code = f"import sys, {own.value}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
