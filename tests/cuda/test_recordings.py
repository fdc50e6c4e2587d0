"""Recordings of physical cards on the bed: torch's own allocator reserves what it did there."""

import pytest
import recorded_step
import torch
from bed import forked
from gpu_check.recording import events_of
from recordings import NAMES, Nothing, Recording, replay, requests_of

from oomprobe.allocator.caching import CachingAllocator
from oomprobe.allocator.settings import AllocatorSettings
from oomprobe.ground.torch_versions import VERSION


class Torchs:
    """torch's allocator, with the methods that `replay` needs."""

    malloc = staticmethod(torch.cuda.caching_allocator_alloc)
    free = staticmethod(torch.cuda.caching_allocator_delete)
    empty_cache = staticmethod(torch.cuda.empty_cache)


def reserved_by_torch(name):
    """Return the reserved bytes after each request."""
    torch.cuda.init()
    return [torch.cuda.memory_reserved() for _ in replay(Recording.named(name), Torchs())]


# torch 2.12 and later choose another one of several free blocks of one size: this program then reserves 7 % more at its peak.
DIFFER = {"MercuryB1-e171b6"} if VERSION >= (2, 12) else set()


@pytest.mark.parametrize("name", NAMES)
def test_torchs_allocator_reserves_what_the_card_did(name):
    recording = Recording.named(name)
    capacity, variables = recording.capacity_bytes, {}
    if recording.expandable_segments:
        variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    here = forked(reserved_by_torch, name, memory=str(capacity), **variables)
    simulated = CachingAllocator(
        capacity, AllocatorSettings(expandable_segments=recording.expandable_segments)
    )
    assert here == [simulated.reserved_bytes for _ in replay(recording, simulated)]
    on_card = [reserved_bytes for *_, reserved_bytes in replay(recording, Nothing())]
    assert (here == on_card) is (name not in DIFFER)


# --- a step written anew ---


def events_of_six_steps():
    torch.cuda.memory._record_memory_history(context=None)
    _, step = recorded_step.build()
    for _ in range(6):
        step()
    return events_of(torch.cuda.memory._snapshot()["device_traces"][0])


def test_the_step_of_a_recording_makes_the_requests_of_the_card():
    on_card = Recording.named(recorded_step.RECORDING).requests
    kept = {
        "TORCH_CUBLAS_WORKSPACE_CACHE": "1"
    }  # as on the card; torch 2.15 takes cuBLAS's workspace for each call
    events = forked(events_of_six_steps, memory="4GiB", **kept)
    first, last = events[: -len(on_card)], events[-len(on_card) :]
    assert requests_of(last, sum(request > 0 for request in requests_of(first))) == on_card
