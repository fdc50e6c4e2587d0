"""Probes with each CUDA allocator, close to the driver's limit, and on the second of two devices."""

import pytest
import torch
from bed import forked, run_on_bed
from zoo import mlp

import oomprobe

MIB, GIB = 2**20, 2**30


def found(*built, **options):
    return oomprobe.find_max_batch(*(built or mlp()), progress="off", **options).to_dict()


ASYNC = """
import sys
sys.path.insert(0, "tests")
from cuda.test_allocators import found, mlp
seen = [torch.cuda.get_allocator_backend(), torch.cuda.get_per_process_memory_fraction()]
model, step = mlp()
results = [found(model, step, resolution=0.1, memory_fraction=share, breakdown=True) for share in (0.9, 1.0)]
seen.append(torch.cuda.get_per_process_memory_fraction())
for _ in range(10):
    step(model, results[1]["batch_size"])
print(json.dumps([seen, results]))
"""


def test_cuda_malloc_async():
    (backend, before, after), results = run_on_bed(
        ASYNC, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync"
    )
    assert backend == "cudaMallocAsync"
    assert before > 1  # it reports 2^33 until one is set
    assert after == 1.0
    for result in results:
        assert (result["limited_by"], result["state_verified"]) == ("memory", True)
        # This backend limits allocated memory; the driver's pool reserves a little more.
        assert 0.85 <= result["trials"][-1]["peak_allocated_bytes"] / result["budget_bytes"] <= 1
        assert (result["trials"][-1]["steps"], result["trials"][-1]["settled_after"]) == (
            50,
            None,
        )  # nothing shows its layout
        assert result["breakdown"] is None  # it records no history
        assert any(note.startswith("no breakdown: ") for note in result["notes"])


def test_an_allocator_without_a_cap_is_refused():
    with pytest.raises(
        oomprobe.UnreliableError, match=r"without its cache.*unset PYTORCH_NO_CUDA_MEMORY_CACHING"
    ):
        forked(found, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


@pytest.mark.parametrize(
    ("memory_fraction", "ceiling"), [(0.5, 2 * GIB - 256 * MIB), (1.0, 2 * GIB)]
)
def test_no_trial_of_this_process_reaches_the_drivers_limit(memory_fraction, ceiling):
    trials = forked(lambda: found(memory_fraction=memory_fraction, resolution=0.1), memory="2GiB")[
        "trials"
    ]
    assert max(trial["cap_bytes"] for trial in trials) == int(ceiling)


def test_the_second_of_two_devices():
    def probe():
        with torch.cuda.device(1):  # "cuda" in the step means the current device
            result = found(resolution=0.05)
        return result, torch.cuda.memory_reserved(0), torch.cuda.current_device()

    result, on_first, current = forked(probe, memory="1GiB,2GiB")
    assert result["environment"]["device"] == "cuda:1"
    assert result["available_bytes"] > GIB
    assert (on_first, current) == (0, 0)
