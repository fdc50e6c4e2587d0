"""scripts/compare_commits.py, which the action in .github/actions/compare runs, on two commits of a repository."""

import os
import shutil
import subprocess
import sys

import pytest
from processes import REPOSITORY, environment

pytestmark = pytest.mark.usefixtures("warm_python")

TRAIN = """
import torch
from net import WIDTH

def build():
    model = torch.nn.Linear(WIDTH, 256)
    optimizer = torch.optim.SGD(model.parameters())

    def step(model, batch_size):
        optimizer.zero_grad()
        model(torch.randn(batch_size, WIDTH)).square().mean().backward()
        optimizer.step()

    return model, step
"""
SMALL, LARGE = ({"jobs/train.py": TRAIN, "net.py": f"WIDTH = {width}"} for width in (4096, 8192))
BROKEN, EMPTY = {"jobs/train.py": "def build(): raise OSError"}, {}
GREW = "memory grew: batch 8 allocates 32.51 MiB, 33.3 % more than 24.39 MiB (tolerance 30 %)"


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    return folder


def git(folder, *words):
    identity = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    return subprocess.run(
        ["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


def commit(folder, files):
    """Commit these files, and no others."""
    for path in ("jobs", "net.py"):
        shutil.rmtree(folder / path) if (folder / path).is_dir() else (folder / path).unlink(
            missing_ok=True
        )
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "A change")


def compare(folder):
    """Run the script as in a job with the head installed; return its exit status, its output and the job's summary."""
    summary = folder.with_name("summary.md")
    variables = environment(GITHUB_STEP_SUMMARY=str(summary))
    variables["PYTHONPATH"] += f"{os.pathsep}{folder}"
    script = [
        sys.executable,
        REPOSITORY / "scripts" / "compare_commits.py",
        "--target=jobs/train.py:build",
    ]
    given = ["--device=sim:1GiB", "--tolerance=30%", "--options=--require 8 --progress 'off'"]
    ended = subprocess.run(
        [*script, *given], cwd=folder / "jobs", env=variables, capture_output=True, text=True
    )
    assert len(git(folder, "worktree", "list").splitlines()) == 1
    return (
        ended.returncode,
        ended.stdout + ended.stderr,
        summary.read_text() if summary.exists() else "",
    )


@pytest.mark.parametrize(
    ("base", "head", "status", "said"),
    [
        (SMALL, LARGE, 5, ["| peak_allocated_bytes | 24.39 MiB | 32.51 MiB |", GREW]),
        (
            EMPTY,
            SMALL,
            0,
            ["Nothing to compare with, the base has no answer: it lacks the target."],
        ),
        (SMALL, BROKEN, 3, ["The head has no answer: `oomprobe run` ended with 3."]),
    ],
    ids=["grown", "new", "broken"],
)
def test_it_ends_as_compare_does_if_there_is_a_base(repository, base, head, status, said):
    commit(repository, base)
    commit(repository, head)
    ended, output, summary = compare(repository)
    assert ended == status, output
    assert all(text in summary for text in said)
    assert summary.startswith("### Memory of `jobs/train.py:build` on sim:1GiB\n")


def test_a_commit_that_is_not_there_is_wrong_usage(repository):
    commit(repository, SMALL)
    ended, output, _ = compare(repository)
    assert ended == 2
    assert "there is no commit HEAD^ here; a checkout with fetch-depth: 2 has HEAD^" in output
