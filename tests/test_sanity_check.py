"""scripts/sanity_check.py, copied and run as users do."""

import re
from pathlib import Path

import pytest
from processes import run_script

SCRIPT = Path(__file__).parent.parent / "scripts" / "sanity_check.py"
SOURCE = SCRIPT.read_text(encoding="utf-8")


def run(tmp_path, *arguments, source=SOURCE):
    """Run a copy of the script elsewhere: it needs nothing but torch and oomprobe."""
    copy = tmp_path / "train.py"
    copy.write_text(source, encoding="utf-8")
    return run_script(copy, *arguments)


def test_a_batch_that_fits_is_trained(tmp_path):
    status, out, err = run(tmp_path, "--batch-size", "6", "--require", "--device", "cpu:1GiB", "--steps", "2")
    assert status == 0, err
    assert re.fullmatch(r"step 0: batch 6, loss \d\.\d{4}\nstep 1: batch 6, loss \d\.\d{4}\n", out)


@pytest.mark.parametrize("require", [True, False])
def test_an_oversized_batch_names_one_that_fits(tmp_path, require):
    arguments = ["--batch-size", "64", "--device", "cpu:24MiB", "--steps", "1", *["--require"] * require]
    status, out, err = run(tmp_path, *arguments)
    assert status == (5 if require else 0), err
    told = re.search(r"^batch 64 does not fit, (\d+) does$", err, re.MULTILINE)
    assert re.search(rf"^verdict: batch {told[1]} fits", err, re.MULTILINE)
    assert 2 <= int(told[1]) < 64
    assert out.startswith(f"step 0: batch {told[1]}, loss") != require


@pytest.mark.parametrize(
    ("device", "source", "status", "said"),
    [
        ("cpu:4MiB", SOURCE, 5, "batch 2, the smallest allowed, does not fit"),
        ("cpu:1GiB", SOURCE.replace("Linear(64, 10)", "Linear(63, 10)"), 3, "shapes cannot be multiplied"),
    ],
    ids=["nothing fits", "bug"],
)
def test_without_an_answer_it_does_not_train(tmp_path, device, source, status, said):
    """The other exit statuses are those of `explained`: tests/test_errors.py."""
    ended, out, err = run(tmp_path, "--batch-size", "4", "--require", "--device", device, source=source)
    assert (ended, out) == (status, "")
    assert said in err
