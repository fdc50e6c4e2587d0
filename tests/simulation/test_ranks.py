"""The first of several ranks on a simulated card; tests/cuda/test_ranks.py compares it with real ranks."""

import functools
import os
from math import prod
from pathlib import Path

import pytest
import sharded
import torch.distributed as dist
from processes import start

import oomprobe
from oomprobe.ground import linux
from oomprobe.ground.torch_versions import VERSION
from oomprobe.records.patience import Patience

TARGETS = Path(__file__).with_name("ddp.py")
FEW_CALLS = Patience(look_calls=8)


@pytest.fixture(autouse=True)
def nothing_stays():
    before = os.environ.get("WORLD_SIZE"), dist.init_process_group
    yield
    assert (os.environ.get("WORLD_SIZE"), dist.init_process_group) == before
    assert not dist.is_initialized()


def probe(name, ranks=8, **options):
    options = {"device": "sim:1GiB", "multiple_of": 1024, "progress": "off", **options}
    return oomprobe.probe_target(f"{TARGETS}:{name}", nproc_per_node=ranks, **options)


@pytest.mark.parametrize("name", ["small_buckets", "compressed", "sync_batch_norm"])
def test_ddp(name):
    result = probe(name)
    assert (result.limited_by, result.world_size, result.environment["world_size"]) == (
        "memory",
        8,
        8,
    )
    assert result.available_bytes == 2**30 - 2**30 // 20  # less NCCL's share
    text = " ".join(str(result).split())
    assert "per rank fits in" in text
    assert (
        "8 fresh processes, one for each rank; torch" in text
    )  # and not this one, which is no rank
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
    one, eight = (
        probe("ddp", ranks, device="sim:H100-80GB", max_batch=8, multiple_of=1) for ranks in (1, 8)
    )
    assert one.available_bytes - eight.available_bytes == 2**30


def check(name, batch_size=1, **options):
    """Check a size of a sharded target, on as many ranks as its mesh has; return the trial."""
    options = {
        "device": "sim:1GiB",
        "memory_fraction": 1.0,
        "confirm_steps": 4,
        "progress": "off",
        **options,
    }
    options["patience"] = FEW_CALLS
    ranks = prod(sharded.MESHES.get(name, (2,)))
    return oomprobe.check_target(
        f"{sharded.__file__}:{name}", batch_size, nproc_per_node=ranks, **options
    ).trials[-1]


@functools.cache
def whole_peak_bytes():
    return check("no_reshard").peak_allocated_bytes


@pytest.mark.parametrize("name", ["recomputing", "on_meta", "drawn", "hsdp", "tensor_parallel"])
def test_shards_take_less_than_whole_parameters(name):
    if name == "drawn" and VERSION < (2, 10):
        pytest.skip("this torch draws less on a DTensor")
    assert check(name).peak_allocated_bytes < whole_peak_bytes()


def test_a_sharded_search_is_predicted():
    options = {"nproc_per_node": 8, "device": "sim:1GiB", "progress": "off", "resolution": 0.1}
    result = oomprobe.probe_target(
        f"{sharded.__file__}:bf16_clipped", patience=FEW_CALLS, **options
    )
    assert result.limited_by == "memory"
    assert {trial.batch_size for trial in result.trials if not trial.replayed} <= {
        1,
        2,
        4,
        result.batch_size,
    }
    assert not any("not compared" in note for note in result.notes)
    assert not any("streams" in item for item in result.not_covered)  # FSDP2's own are covered


def test_a_step_that_fails_leaves_no_gathered_parameters_behind():
    """Trials above 4 run out of memory, and none is predicted."""
    name = f"{sharded.__file__}:fails_in_backward"
    options = {
        "nproc_per_node": 2,
        "device": "sim:1GiB",
        "progress": "off",
        "resolution": 0,
        "confirm_steps": 1,
    }
    result = oomprobe.probe_target(name, max_batch=8, patience=FEW_CALLS, **options)
    assert result.batch_size == 4
    assert sum(not trial.passed and not trial.replayed for trial in result.trials) >= 4
    passed = {trial.peak_reserved_bytes for trial in result.trials if trial.batch_size == 4}
    assert passed == {check("fails_in_backward", 4).peak_reserved_bytes}


def test_a_model_built_on_meta_takes_no_host_memory():
    def resident_bytes():
        return linux.process_bytes("VmHWM")

    def taken():
        before = resident_bytes()
        trial = check("large_on_meta", device="sim:80GiB")
        return trial.peak_allocated_bytes, resident_bytes() - before

    on_card, on_host = start(taken).result()
    assert on_card > 8 * 2**30
    assert on_host < 2**30


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("offloading", "CPUOffloadPolicy keeps parameters in host memory.*leave out the policy"),
        ("fsdp1", r"FSDP1\).*shard with fully_shard"),
        pytest.param(
            "symmetric_memory",
            "memory of NCCL's own",
            marks=pytest.mark.skipif(VERSION < (2, 10), reason="torch before 2.10 has none"),
        ),
        ("pipeline", "stages of a pipeline take different memory"),
        (
            "exchanging",
            "all_to_all at sharded.py:[0-9]+ sends parts of a tensor whose sizes depend on values",
        ),
        ("exchanging_functionally", "sizes depend on values"),
        ("compiled_layers", "a compiled model that is sharded.*leave out torch.compile"),
    ],
)
@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated"
)  # by what torch.compile imports
def test_what_one_card_cannot_stand_for_is_refused_in_a_sentence(name, said):
    with pytest.raises(oomprobe.UnreliableError, match=said):
        check(name)


@pytest.mark.parametrize(
    ("name", "ranks", "said"),
    [
        ("no_group", 8, "initialised a process group"),
        ("ddp", "gpu", "nproc_per_node must be an integer of at least 1, not 'gpu'"),
    ],
)
def test_refused(name, ranks, said):
    with pytest.raises(oomprobe.InvalidArgumentError, match=said):
        probe(name, ranks)
