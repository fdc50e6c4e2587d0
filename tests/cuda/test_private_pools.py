"""Private pools of the model compared with those of torch's own allocator, operation by operation."""

import pytest
import torch
from allocations import Modelled, outcomes
from bed import forked

from oomprobe.ground.torch_versions import VERSION

from .test_simulated import PAIRS, SETTINGS

in_this_version = pytest.mark.skipif(VERSION != (2, 14), reason="the version of the model")


class Torchs:
    """Torch's allocator."""

    def __init__(self, text):
        torch._C._accelerator_setAllocatorSettings(text)
        torch.cuda.init()
        self.malloc = torch.cuda.caching_allocator_alloc
        self.free = torch.cuda.caching_allocator_delete
        self.empty_cache, self.stats = torch.cuda.empty_cache, torch.cuda.memory_stats
        self.limit = torch.cuda.set_per_process_memory_fraction
        self._streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
        self._pools, self._used, self._graphs = {}, {}, {}
        self._capturing = torch.cuda.Stream()

    def stream(self, number):
        torch.cuda.set_stream(self._streams[number])

    def make(self, pool, kind=None):
        self._pools[pool] = torch.cuda.MemPool(**(kind or {}))

    def enter(self, pool):
        self._used[pool] = torch.cuda.use_mem_pool(self._pools[pool])
        self._used[pool].__enter__()

    def leave(self, pool):
        self._used.pop(pool).__exit__(None, None, None)

    def drop(self, pool):
        del self._pools[pool]

    def begin_capture(self, pool):
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, stream=self._capturing)
        self._graphs[pool] = graph, capture
        capture.__enter__()

    def end_capture(self, pool):
        graph, capture = self._graphs[pool]
        capture.__exit__(None, None, None)
        self._graphs[pool] = graph

    def reset(self, pool):
        self._graphs.pop(pool).reset()


@in_this_version
@pytest.mark.parametrize("text", SETTINGS.values())
def test_private_pools_have_the_same_outcome_as_in_torch(text):
    check(text, 1500, 0)


# Later, torch 2.14.1 itself crashes with expandable segments: it forgets a pool of which blocks are in use.
LONG = [text for text in (*SETTINGS.values(), *PAIRS) if "expandable" not in text]


@in_this_version
@pytest.mark.slow
@pytest.mark.parametrize("text", LONG)
def test_many_operations_on_private_pools(text):
    check(text, 20_000, 1)


def check(text, count, seed):
    bed = {"memory": "3000MiB", "context": "2710MiB", "limit_s": 300}
    expected = forked(lambda: outcomes(count, seed, Torchs(text)), **bed)
    found = outcomes(count, seed, Modelled(text))
    assert {"drop", "reset", "end capture", "leave"} <= {kind for kind, *_ in found}
    for number, (here, there) in enumerate(zip(found, expected, strict=True)):
        assert here == there, number
