"""What the other tests rely on: torch uses the bed's devices, and its allocator runs out of memory on them."""

import os
import subprocess

import pytest
import torch
from processes import is_gone, until

from bed import forked

MIB = 2**20


def allocate(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("capability", ["7.5", "8.6", "9.0", "12.0"])
def test_sorts_run_on_every_capability(capability):
    def largest():
        newest = max(
            int(name[3:]) for name in torch._C._cuda_getArchFlags().split()
        )  # such as sm_90
        if float(capability) * 10 > newest + 9:
            return None
        return torch.sort(torch.zeros(100_000, device="cuda")).values.numel()

    found = forked(largest, card=f"{capability},46,1536")
    if found is None:
        pytest.skip("this build of torch refuses so new a card")
    assert found == 100_000


@pytest.mark.parametrize(
    ("fraction", "said"),
    [
        (1.0, "600.00 MiB. GPU 0 has a total capacity of 1024.00 MiB of which 512.00 MiB is free"),
        (0.5, r".*512\.00 MiB allowed"),
    ],
)
def test_out_of_memory(fraction, said):
    def fill():
        torch.cuda.set_per_process_memory_fraction(fraction)
        kept = allocate(512)
        allocate(600)
        return kept

    with pytest.raises(torch.OutOfMemoryError, match=f"Tried to allocate {said}"):
        forked(fill)


def test_visible_devices(tmp_path):
    def look():
        cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return [
            (str(card.uuid), getattr(card, "pci_bus_id", None), card.total_memory // MIB)
            for card in cards
        ]

    def look_late():  # CUDA reads it when it is first used, not when torch is imported
        os.environ["CUDA_VISIBLE_DEVICES"] = "2,1"
        return look()

    bed = {"memory": "1GiB,2GiB,3GiB"}
    every = forked(look, **bed)
    assert [bus for _, bus, _ in every] in ([1, 2, 3], [None] * 3)  # torch 2.6 does not tell it
    assert [mib for *_, mib in every] == [1024, 2048, 3072]
    assert len({row[0] for row in every}) == 3
    assert (
        forked(look_late, **bed)
        == forked(look, **bed, CUDA_VISIBLE_DEVICES="2,1")
        == [every[2], every[1]]
    )
    assert forked(look, **bed, CUDA_VISIBLE_DEVICES="0,7,1") == every[:1]


def test_transient_fault():
    def retried():
        return allocate(1).device.type, torch.cuda.memory_stats()["num_alloc_retries"]

    assert forked(retried, fail="malloc:1:2") == ("cuda", 1)


def test_index_out_of_bounds():
    def look_up():
        torch.nn.Embedding(10, 4, device="cuda")(torch.full((3,), 10, device="cuda"))
        torch.cuda.synchronize()

    with pytest.raises(RuntimeError, match="device-side assert triggered"):
        forked(look_up)


def test_forked_timeout_kills_grandchildren(tmp_path):
    def hang():
        process = subprocess.Popen(["sleep", "60"])
        (tmp_path / "pid").write_text(str(process.pid))
        process.wait()

    with pytest.raises(TimeoutError, match=r"longer than 0.5 s"):
        forked(hang, limit_s=0.5)
    grandchild = int((tmp_path / "pid").read_text())
    assert until(lambda: is_gone(grandchild), within_s=5)
