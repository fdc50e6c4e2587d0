"""The examples on the bed, typed as their docstrings say: they train with the answer."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bed import forked
from processes import REPOSITORY, environment
from torch import nn
from typed import EXAMPLES, commands, typed

import oomprobe
from oomprobe import ProbeResult

from .ranks import BRIEF, cards, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own
CARD = {"limit_s": 120, "CUDASTUB_ASSERT": 0}


def stored(path):
    return ProbeResult.from_dict(json.loads(path.read_text()))


def test_the_plain_loop_trains_with_the_answer_or_refuses_the_size_that_is_asked_for():
    search, check = commands("plain_loop.py")
    status, out, err = forked(typed, search, **CARD)
    assert status == 0, err
    [answer] = re.findall(r"^verdict: batch (\d+) fits", out)
    trained = [
        int(size) for size in re.findall(r"^trained on (\d+) images: loss ", out, re.MULTILINE)
    ]
    assert {*trained[:-1]} == {int(answer)}
    assert sum(trained) == 1000
    status, out, err = forked(typed, check, **CARD)
    assert (status, out) == (1, "")
    assert "NothingFitsError: batch 64 does not fit on Stub GPU" in err


@pytest.mark.slow
def test_a_table_trains_in_its_buckets():
    [command] = commands("length_table.py")
    status, out, err = forked(
        typed, command, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", **CARD
    )
    assert status == 0, err
    columns = out.splitlines()[2].split()
    column = columns.index("batch")
    rows = [line.replace("*", " ").split() for line in out.splitlines()[3:6]]
    largest = {int(row[0]): int(row[column]) for row in rows}
    trained = re.findall(r"^trained on (\d+) sequences of up to (\d+) tokens", out, re.MULTILINE)
    assert sum(int(size) for size, _ in trained) == 4000
    buckets = [
        (int(size), min(limit for limit in largest if limit >= int(longest)))
        for size, longest in trained
    ]
    assert all(size <= largest[limit] for size, limit in buckets)
    assert sum(size < largest[limit] for size, limit in buckets) <= 3  # the last of each bucket


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("transformers_trainer.py", r"'train_runtime': ", marks=pytest.mark.slow),
        ("lightning_module.py", r"Epoch 0: 100%\|\W*\| (\d+)/\1 "),
        ("inference.py", r"scored 2000 continuations"),
    ],
)
def test_with_a_framework(name, said):
    [command] = commands(name)
    status, out, err = forked(typed, command, memory="4GiB", **CARD)
    assert status == 0, err
    assert out.startswith("verdict: ")
    assert "identical\n" in out  # the state was restored
    [*_, found] = re.finditer(said, out + err)
    if found.groups():  # the batches of an epoch
        assert int(found[1]) == math.ceil(2000 / int(out.split()[2]))


def test_ranks_and_fsdp_shards_what_ddp_keeps(tmp_path):
    def peak_bytes(name):
        target = f"{EXAMPLES / name}:build"
        checked = oomprobe.check_target(target, 1, nproc_per_node=2, patience=BRIEF, progress="off")
        return checked.trials[-1].peak_allocated_bytes

    peaks = [
        on_ranks(tmp_path, lambda name=name: peak_bytes(name), memory="2GiB,2GiB")
        for name in ("ddp.py", "fsdp2.py")
    ]
    weights = 3 * sum(p.numel() for p in nn.TransformerEncoderLayer(512, 8).parameters())
    kept_bytes = 3 * 4 * weights  # the weights, and the two values that AdamW keeps for each
    # A half of these, of gradients and of buckets; without shards, DDP alone takes 2.2 times the weights more.
    assert peaks[0] - peaks[1] > kept_bytes


# --- in processes of their own ---


def shell(tmp_path, words):
    """Run a command on two cards as a shell does; return its output and its errors."""
    (tmp_path / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {f"CUDASTUB_{name.upper()}": str(value) for name, value in cards(tmp_path).items()}
    variables |= {
        "CUDASTUB_MEMORY": "4GiB,4GiB",
        "PATH": path,
        "SLURM_JOB_ID": "7",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        words,
        cwd=REPOSITORY,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp.py", "fsdp2.py"])
def test_ranks_train_with_the_answer(name, tmp_path):
    probe, train = commands(name)
    out, _ = shell(tmp_path, probe)
    [answer] = re.findall(r"^verdict: batch (\d+) per rank fits", out)
    out, _ = shell(tmp_path, [answer if word == "64" else word for word in train])
    assert {"rank 0: step 10", "rank 1: step 10"} <= {*out.splitlines()}


@pytest.mark.slow
def test_a_command_that_knows_nothing_of_oomprobe(tmp_path):
    [probe] = commands("train_torchrun.py")
    out, _ = shell(tmp_path, probe)
    assert re.match(r"verdict: batch \d+ fits in .* on 2 x Stub GPU", out)
    assert "2 fresh processes" in out


@pytest.mark.slow
def test_a_job(tmp_path):
    job = (
        (EXAMPLES / "job.slurm")
        .read_text()
        .replace("probe-$SLURM_JOB_ID", f"{tmp_path}/probe-$SLURM_JOB_ID")
    )
    (tmp_path / "job.slurm").write_text(job)
    out, err = shell(tmp_path, ["bash", str(tmp_path / "job.slurm")])
    [answer] = re.findall(r"^batch size of each GPU: (\d+)$", out, re.MULTILINE)
    assert err.startswith("probing 2 x Stub GPU")
    assert stored(tmp_path / "probe-7.json").batch_size == int(answer)
    assert "rank 1: step 10" in out
