import pytest
import torch

from oomprobe.simulation.allocator import AllocatorOutOfMemory, CachingAllocator
from oomprobe.simulation.memory import Memory
from oomprobe.simulation.settings import AllocatorSettings
from oomprobe.simulation.tape import BORN, DIED, Call

MIB = 2**20


def memory(capacity_bytes):
    return Memory(CachingAllocator(capacity_bytes, AllocatorSettings()))


def test_a_refused_repeat_changes_only_counters():
    one = memory(50 * MIB)
    kept = torch.UntypedStorage(4 * MIB)
    one.take(kept)
    one.begin()
    events = ((BORN, 0, 0), (BORN, 1, 0), (DIED, 0, 0), (DIED, 0, 1))
    with pytest.raises(AllocatorOutOfMemory):
        one.repeat(Call(events, (20 * MIB, 30 * MIB)))
    assert one.allocator.ooms == 1
    assert one.allocator.alloc_retries == 1
    assert one.allocator.peak_allocated_bytes == 24 * MIB
    assert one.allocator.peak_reserved_bytes == 40 * MIB
    assert one.allocator.allocated_bytes == 4 * MIB
    one.drop(kept)
    assert one.allocator.allocated_bytes == 0
