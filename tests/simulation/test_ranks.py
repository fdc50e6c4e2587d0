"""The first of several ranks on a simulated card; tests/cuda/test_ranks.py compares it with real ranks."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist

import oomprobe
from oomprobe.cli import main

TARGETS = Path(__file__).with_name("ddp.py")


@pytest.fixture(autouse=True)
def nothing_stays():
    before = os.environ.get("WORLD_SIZE"), dist.init_process_group
    yield
    assert (os.environ.get("WORLD_SIZE"), dist.init_process_group) == before
    assert not dist.is_initialized()


def probe(name, ranks=8, **options):
    options = {"device": "sim:1GiB", "multiple_of": 1024, "progress": "off", **options}
    return oomprobe.probe_target(f"{TARGETS}:{name}", nproc_per_node=ranks, **options)


@pytest.mark.parametrize("name", ["ddp", "small_buckets", "compressed", "sync_batch_norm"])
def test_ddp(name):
    result = probe(name)
    assert (result.limited_by, result.world_size, result.environment["world_size"]) == ("memory", 8, 8)
    assert result.available_bytes == 2**30 - 2**30 // 20  # less NCCL's share
    text = " ".join(str(result).split())
    assert "8 fresh processes, one for each rank; torch" in text  # and not this one, which is no rank
    [about_nccl] = [note for note in result.notes if "NCCL" in note]
    assert about_nccl.startswith(
        "one rank of 8 was simulated, with collectives that take no memory; 51.20 MiB of the card"
    )
    assert any("hooks" in note for note in result.notes) is (name == "compressed")


def test_ranks_on_several_cards():
    cards = ["sim:2GiB", "sim:1GiB"]
    table = probe("ddp", device=None, over={"device": cards})
    assert [(one.batch_size, one.was_replayed) for one in table.rows.values()] == [
        (probe("ddp", device=card).batch_size, card == "sim:1GiB") for card in cards
    ]


def test_a_card_of_80_gb_keeps_a_gibibyte_for_nccl():
    one, eight = (probe("ddp", ranks, device="sim:H100-80GB", max_batch=8, multiple_of=1) for ranks in (1, 8))
    assert one.available_bytes - eight.available_bytes == 2**30


@pytest.mark.parametrize(
    ("name", "ranks", "said"),
    [
        ("fsdp2", 8, "a simulated card has ranks for DDP only"),
        ("fsdp1", 8, "leave out --nproc-per-node, and let build"),
        ("no_group", 8, "initialised a process group"),
        ("ddp", "gpu", "nproc_per_node must be an integer of at least 1, not 'gpu'"),
        ("ddp", 0, "nproc_per_node must be an integer of at least 1, not 0"),
    ],
)
def test_refused(name, ranks, said):
    with pytest.raises(oomprobe.InvalidArgumentError, match=said):
        probe(name, ranks)


def test_the_command_line(capsys):
    status = main(["run", f"{TARGETS}:ddp", "--device", "sim:1GiB", "--nproc-per-node", "8", "--multiple-of", "1024"])
    assert status == 0
    assert "per rank fits in" in capsys.readouterr().out
