"""scripts/sanity_check.py, copied and run as users do."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "sanity_check.py"
SOURCE = SCRIPT.read_text(encoding="utf-8")


def run(tmp_path, *arguments, source=SOURCE):
    """Run a copy of the script elsewhere: it needs nothing but torch and oomprobe."""
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


@pytest.mark.parametrize(
    ("arguments", "source", "code", "said"),
    [
        (["--device", "cpu:4MiB", "--require"], SOURCE, 5, "batch 2, the smallest allowed, does not fit"),
        (
            ["--device", "cpu:1GiB"],
            SOURCE.replace("Linear(64, 10)", "Linear(63, 10)"),
            3,
            "shapes cannot be multiplied",
        ),
    ],
    ids=["nothing fits", "bug"],
)
def test_without_an_answer_it_does_not_train(tmp_path, arguments, source, code, said):
    """The other exit statuses are those of `explained`: tests/test_exits.py."""
    done = run(tmp_path, "--batch-size", "4", *arguments, source=source)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
