"""Commands that are probed, run for real on the bed: launchers of several ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import oomprobe

from .test_command import OOM, SCRIPT, one_trial, probe, python
from .test_command import bed as bed  # an autouse fixture

BIN = Path(sys.executable).parent
MIB = 2**20


@pytest.fixture(autouse=True)
def two_cards(monkeypatch, bed):
    monkeypatch.setenv("CUDASTUB_MEMORY", "1GiB,1GiB")
    monkeypatch.setenv("CUDASTUB_NCCL", "64MiB")


def torchrun(*words, backend="nccl"):
    script = [str(SCRIPT), "--batch-size", "{batch}", "--backend", backend]
    return [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", *script, *words]


@pytest.mark.parametrize(
    ("backend", "fault", "said"),
    [
        ("gloo", "backward", "torch.OutOfMemoryError: CUDA out of memory"),
        ("nccl", "caught-then-hangs", "its allocator ran out of memory, and the program caught that"),
    ],
)
def test_one_rank_runs_out_of_memory(backend, fault, said):
    trial = one_trial(torchrun("--fault", fault, "--rank", "1", backend=backend))
    assert trial.verdict is OOM
    assert trial.error.startswith(f"rank 1: {said}")
    assert trial.where.startswith("script.py:")


def test_a_bug_on_one_rank():
    with pytest.raises(oomprobe.StepFailedError, match=r"rank 1: KeyError: 'input_ids'") as caught:
        probe(torchrun("--fault", "bug", "--rank", "1"), start_batch=8)
    assert "KeyError: 'input_ids'" in str(caught.value).splitlines()[-1]


def test_fsdp_in_nccl_and_what_nccl_takes():
    result = oomprobe.check_command(torchrun("--fsdp"), 8, progress="off")
    # 1024 MiB less a context, the kernels and a communicator.
    assert result.available_bytes == (1024 - 100 - 50 - 64) * MIB
    assert result.device == "2 x Stub GPU"
    assert result.environment["world_size"] == result.world_size == 2
    assert [(one.rank, one.verdict) for one in result.trials[-1].ranks] == [(0, "fits"), (1, "fits")]
    assert "2 fresh processes" in str(result)
    assert "2 ranks, all alike" in str(result)


@pytest.mark.slow
def test_two_machines(tmp_path):
    """Two agents, each with one of the cards; the first one is the command, and the other its child."""
    agent = (
        f"{BIN}/torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:$0 --rdzv-id $0"
    )
    script = f"{SCRIPT} --batch-size $1"
    both = f"CUDA_VISIBLE_DEVICES=1 {agent} {script} & CUDA_VISIBLE_DEVICES=0 exec {agent} {script}"
    port = str(20_000 + os.getpid() % 20_000)
    result = oomprobe.check_command(["sh", "-c", both, port, "{batch}"], 8, progress="off")
    assert result.environment["world_size"] == 2
    assert result.trials[-1].steps >= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [python(), torchrun(backend="gloo"), torchrun(), torchrun("--fsdp")],
    ids=["python", "ddp-gloo", "ddp-nccl", "fsdp-nccl"],
)
def test_the_answer_of_a_search_runs_without_oomprobe(command):
    """Fresh runs of 200 steps: the answer with and without the cap, and what is larger by more than the resolution."""
    result = probe(command, start_batch=16)
    assert len(result.trials) <= 14
    fraction = f"per_process_memory_fraction:{result.budget_bytes / 2**30:.9f}"

    def runs(size, settings):
        words = [word.replace("{batch}", str(size)) for word in command] + ["--steps", "200"]
        environment = {**os.environ, "PYTORCH_ALLOC_CONF": settings}
        return subprocess.run(words, env=environment, capture_output=True, check=False).returncode == 0

    answer = result.batch_size
    assert runs(answer, "")
    assert runs(answer, fraction)
    assert not any(runs(size, fraction) for size in range(answer + 2, answer + 6))


@pytest.mark.slow
def test_accelerate():
    launch = [str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    script = [str(SCRIPT), "--batch-size", "{batch}", "--backend", "nccl"]
    assert oomprobe.check_command([*launch, *script], 8, progress="off").environment["world_size"] == 2
    trial = one_trial([*launch, *script, "--fault", "backward", "--rank", "1"])
    assert (trial.verdict, trial.error.partition(": ")[0]) == (OOM, "rank 1")
