"""The script that people copy, run as they run it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "sanity_check.py"
SOURCE = SCRIPT.read_text(encoding="utf-8")


def run(tmp_path, *arguments, source=SOURCE):
    """A copy of it, somewhere else: it needs nothing but torch and oomprobe."""
    copy = tmp_path / "train.py"
    copy.write_text(source, encoding="utf-8")
    return subprocess.run([sys.executable, copy, *arguments], capture_output=True, text=True, check=False)


def test_a_batch_that_fits_is_trained(tmp_path):
    done = run(tmp_path, "--batch-size", "6", "--require", "--device", "cpu:1GiB", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"step 0: batch 6, loss \d\.\d{4}\nstep 1: batch 6, loss \d\.\d{4}\n", done.stdout)


@pytest.mark.parametrize("require", [True, False])
def test_an_oversized_batch_names_one_that_fits(tmp_path, require):
    arguments = ["--batch-size", "64", "--device", "cpu:48MiB", "--steps", "1", *["--require"] * require]
    done = run(tmp_path, *arguments)
    assert done.returncode == (5 if require else 0), done.stderr
    told = re.search(r"^batch 64 does not fit, (\d+) does$", done.stderr, re.MULTILINE)
    assert re.search(rf"^verdict: batch {told[1]} fits", done.stderr, re.MULTILINE)
    assert 2 <= int(told[1]) < 64
    assert done.stdout.startswith(f"step 0: batch {told[1]}, loss") != require


@pytest.mark.parametrize(("require", "code"), [(True, 5), (False, 1)])
def test_where_nothing_fits_it_does_not_train(tmp_path, require, code):
    done = run(tmp_path, "--batch-size", "4", "--device", "cpu:4MiB", *["--require"] * require)
    assert (done.returncode, done.stdout) == (code, "")
    assert "batch 2, the smallest allowed, does not fit" in done.stderr


def test_a_bug_is_not_an_oversized_batch(tmp_path):
    broken = SOURCE.replace("nn.Linear(64, 10)", "nn.Linear(63, 10)")
    assert broken != SOURCE
    done = run(tmp_path, "--batch-size", "4", "--device", "cpu:1GiB", "--require", source=broken)
    assert done.returncode == 3
    assert "mat1 and mat2 shapes cannot be multiplied" in done.stderr


@pytest.mark.parametrize(("device", "code"), [("cuda:7", 4), ("cpu:lots", 2)])
def test_a_missing_device_is_reported_first(tmp_path, device, code):
    done = run(tmp_path, "--batch-size", "4", "--device", device, "--require")
    assert (done.returncode, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("oomprobe: ")
    assert (f"no device {device!r} here" in done.stderr) == (code == 4)
