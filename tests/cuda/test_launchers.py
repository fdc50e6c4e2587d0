"""Commands that are probed, run for real on the bed: launchers of several ranks."""

import os
import sys
from pathlib import Path

import pytest

import oomprobe

from .test_command import OOM, SCRIPT, one_trial, probe, without_predictions
from .test_command import bed as bed  # an autouse fixture

BIN = Path(sys.executable).parent
MIB = 2**20


@pytest.fixture(autouse=True)
def two_cards(monkeypatch, bed):
    monkeypatch.setenv("CUDASTUB_MEMORY", "1GiB,1GiB")
    monkeypatch.setenv("CUDASTUB_NCCL", "64MiB")


def torchrun(*words):
    script = [str(SCRIPT), "--batch-size", "{batch}", "--backend", "nccl"]
    return [
        "python",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *script,
        *words,
    ]


def test_one_rank_runs_out_of_memory_and_hangs():
    trial = one_trial(torchrun("--fault", "caught-then-hangs", "--rank", "1"))
    assert trial.verdict is OOM
    assert trial.error.startswith(
        "rank 1: its allocator ran out of memory, and the program caught that"
    )
    assert trial.where.startswith("script.py:")


def test_a_bug_on_one_rank():
    with pytest.raises(oomprobe.StepFailedError, match=r"rank 1: KeyError: 'input_ids'") as caught:
        probe(torchrun("--fault", "bug", "--rank", "1"), start_batch=8)
    assert "KeyError: 'input_ids'" in str(caught.value).splitlines()[-1]


def test_what_passes_in_nccl_and_what_nccl_takes():
    result = oomprobe.check_command(torchrun(), 8, progress="off")
    # 1024 MiB less a context, the kernels and a communicator.
    assert result.available_bytes == (1024 - 100 - 50 - 64) * MIB
    assert result.device == "2 x Stub GPU"
    assert result.environment["world_size"] == result.world_size == 2
    assert [(one.rank, one.verdict) for one in result.trials[-1].ranks] == [
        (0, "fits"),
        (1, "fits"),
    ]
    assert "2 fresh processes" in str(result)


@pytest.mark.slow
def test_a_search_on_two_ranks_replays_sizes(monkeypatch):
    predicting = probe(torchrun())
    without_predictions(monkeypatch)
    running = probe(torchrun())
    assert predicting.environment["predicted"] is True
    assert predicting.batch_size >= running.batch_size
    assert sum(not trial.replayed for trial in predicting.trials) <= 7
    assert len(running.trials) >= 12


@pytest.mark.slow
def test_two_machines(tmp_path):
    """Two agents, each with one of the cards; the first one is the command, and the other its child."""
    agent = f"{BIN}/torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:$0 --rdzv-id $0"
    script = f"{SCRIPT} --batch-size $1"
    both = f"CUDA_VISIBLE_DEVICES=1 {agent} {script} & CUDA_VISIBLE_DEVICES=0 exec {agent} {script}"
    port = str(20_000 + os.getpid() % 20_000)
    result = oomprobe.check_command(["sh", "-c", both, port, "{batch}"], 8, progress="off")
    assert result.environment["world_size"] == 2
    assert result.trials[-1].steps >= 6


@pytest.mark.slow
def test_accelerate():
    launch = [
        str(BIN / "accelerate"),
        "launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    script = [str(SCRIPT), "--batch-size", "{batch}", "--backend", "nccl"]
    assert (
        oomprobe.check_command([*launch, *script], 8, progress="off").environment["world_size"] == 2
    )
    trial = one_trial([*launch, *script, "--fault", "backward", "--rank", "1"])
    assert (trial.verdict, trial.error.partition(": ")[0]) == (OOM, "rank 1")
