"""Random operations on torch's allocators, and what their models answer, which tests/cuda compares with torch's own."""

import random

import torch

from oomprobe.allocator import (
    AllocatorOutOfMemory,
    AllocatorSettings,
    CachingAllocator,
    PinnedAllocator,
)

MIB = 2**20
STATS = [
    "allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current", "reserved_bytes.all.peak",
    "requested_bytes.all.current", "inactive_split_bytes.all.current", "num_alloc_retries", "num_ooms",
]  # fmt: skip
CAPTURING = 9  # the stream of captures
# Pools made as torch.cuda.MemPool makes them.
KINDS = ({}, {}, {"no_split": True}, {"use_on_oom": True}, {"use_on_oom": True, "no_split": True})
ENDS = {"capture": "end capture", "pool": "leave"}


def operations(count, seed):
    """Yield random operations: requests, frees, and pools that are made, used, captured into and dropped."""
    draw = random.Random(seed).random
    sizes = [int(2 ** (draw() * 26)) for _ in range(20)]
    sizes += [512, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 21 * MIB]
    live, pools, active, captures, grows, made, overflow = [], [], [], [], 0.55, 0, 0
    for number in range(count):
        kind = draw()
        if number % 150 == 0:
            grows = 0.42 + draw() * 0.2
        if kind < 0.01:
            yield "empty", None, None
        elif kind < 0.013:
            yield "limit", 0.05 + int(draw() * 4) / 80, None
        elif kind < 0.03 and not active:
            yield "stream", int(draw() * 2), None
        elif kind < 0.05 and len(pools) < 5:
            made += 1
            pools.append(made)
            flags = KINDS[int(draw() * len(KINDS))]
            if "use_on_oom" in flags:
                if overflow in pools[:-1]:  # torch asks several in the order of a hash
                    flags = {}
                else:
                    overflow = made
            yield "make", made, flags
        elif kind < 0.06 and not active and len(captures) < 4:
            made += 1
            active.append(("capture", made))
            yield "begin capture", made, None
        elif kind < 0.09 and pools and len(active) < 2:
            pool = pools[int(draw() * len(pools))]
            if ("pool", pool) not in active:
                active.append(("pool", pool))
                yield "enter", pool, None
        elif kind < 0.13 and active:
            what, pool = active.pop()
            if what == "capture":
                captures.append(pool)
            yield ENDS[what], pool, None
        elif kind < 0.14 and len(pools) > 1 and not active:
            yield "drop", pools.pop(int(draw() * len(pools))), None
        elif kind < 0.15 and captures and not active:
            yield "reset", captures.pop(int(draw() * len(captures))), None
        elif not live or draw() < grows:
            live.append(number)
            yield "malloc", number, sizes[int(draw() * len(sizes))] + int(draw() * 2) * 5000
        else:
            yield "free", live.pop(int(draw() * len(live))), None
    for what, pool in reversed(active):
        yield ENDS[what], pool, None


def outcomes(operations, allocator):
    """Return the figures and any error message after each operation."""
    handles, results = {}, []
    for kind, number, detail in operations:
        message = ""  # without its advice, which differs between versions of torch
        if kind == "malloc":
            try:
                handles[number] = allocator.malloc(detail)
            except (torch.OutOfMemoryError, AllocatorOutOfMemory) as error:
                message = str(error).partition(" by PyTorch but unallocated.")[0]
        elif kind == "free":
            if number in handles:
                allocator.free(handles.pop(number))
        elif kind == "empty":
            allocator.empty_cache()
        else:
            getattr(allocator, kind.replace(" ", "_"))(number, *filter(None, [detail]))
        figures = allocator.stats()
        results.append((kind, [figures[name] for name in STATS], message))
    return results


class Torchs:
    """Torch's allocator."""

    def __init__(self, text):
        since_2_10 = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (since_2_10 or torch.cuda.memory._set_allocator_settings)(text)
        torch.cuda.init()
        self.malloc = torch.cuda.caching_allocator_alloc
        self.free = torch.cuda.caching_allocator_delete
        self.empty_cache, self.stats = torch.cuda.empty_cache, torch.cuda.memory_stats
        self.limit = torch.cuda.set_per_process_memory_fraction
        self._streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
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


class Modelled:
    """The model, as `torch.cuda.MemPool` and `torch.cuda.graph` would call it."""

    def __init__(self, text):
        settings = AllocatorSettings.from_text(text)
        # The large total gives an expandable segment room for everything, where a driver would place a second one elsewhere.
        self._allocator = CachingAllocator(290 * MIB, settings, total_bytes=3000 * MIB)
        if settings.per_process_memory_fraction < 1:
            self.limit(settings.per_process_memory_fraction)
        self.stream, self.malloc = self._allocator.use_stream, self._allocator.malloc
        self.free, self.stats = self._allocator.free, self._allocator.stats
        self.drop, self.empty_cache = self._allocator.drop_pool, self._allocator.empty_cache
        self._before, self._captured = 0, 0
        self._retained = {}  # pools that a graph keeps

    def limit(self, fraction):
        self._allocator.limit_bytes = int(fraction * self._allocator.total_bytes)

    def make(self, pool, kind=None):
        self._allocator.pools.make(pool, **(kind or {}))

    def enter(self, pool):
        self._allocator.pools.use(pool)
        if self._captured and pool not in self._retained[self._captured]:
            self._retained[self._captured].append(pool)
            self._allocator.pools.users[pool] += 1

    def leave(self, pool):
        self._allocator.pools.leave(pool)
        self._allocator.pools.release(pool)

    def begin_capture(self, pool):
        self._captured, self._retained[pool] = pool, []
        self._allocator.empty_cache()
        self._before = self._allocator.stream
        self._allocator.use_stream(CAPTURING)
        self._allocator.pools.use(pool, captures=True)

    def end_capture(self, pool):
        self._captured = 0
        self._allocator.pools.leave(pool)
        self._allocator.use_stream(self._before)

    def reset(self, pool):
        for used in (pool, *self._retained.pop(pool)):
            self._allocator.pools.release(used)


# --- pinned memory ---

STREAMS = 3  # two of which can be kept busy
PINNED_SETTINGS = (
    "", "pinned_max_round_threshold_mb:1", "pinned_max_cached_size_mb:2",
    "pinned_max_round_threshold_mb:4,pinned_max_cached_size_mb:1", "pinned_max_cached_size_mb:0",
)  # fmt: skip


def pinned_operations(count, text):
    """Yield random operations: pin, copy on a stream, free, keep a stream busy, let it go, empty the cache."""
    draw = random.Random(f"{count} {text}").random
    sizes = [1, 512, 4097, MIB, MIB + 1, 3 * MIB, 4 * MIB, 5 * MIB + 3]
    sizes += [int(2 ** (draw() * 23)) for _ in range(20)]
    live, busy = [], set()
    for number in range(count):
        kind, stream = draw(), 1 + int(draw() * (STREAMS - 1))
        if kind < 0.02:
            yield "empty", None, None
        elif kind < 0.06 and stream not in busy:
            busy.add(stream)
            yield "hold", stream, None
        elif kind < 0.14 and stream in busy:
            busy.remove(stream)
            yield "let go", stream, None
        elif kind < 0.4 and live:
            yield "copy", live[int(draw() * len(live))], int(draw() * STREAMS)
        elif kind < 0.7 or not live:
            live.append(number)
            yield "pin", number, sizes[int(draw() * len(sizes))]
        else:
            yield "free", live.pop(int(draw() * len(live))), None
    for stream in busy:
        yield "let go", stream, None


def pinned_outcomes(count, text):
    """Return the model's figures after each operation."""
    allocator = PinnedAllocator(AllocatorSettings.from_text(text))
    handles, busy, results = {}, set(), []
    for kind, which, detail in pinned_operations(count, text):
        for stream in {*range(STREAMS)} - busy:
            allocator.synchronize(stream)
        if kind == "pin":
            handles[which] = allocator.malloc(detail)
        elif kind == "free":
            allocator.free(handles.pop(which))
        elif kind == "copy":
            allocator.record_stream(handles[which], detail)
        elif kind == "hold":
            busy.add(which)
        elif kind == "let go":
            busy.remove(which)
        else:
            allocator.empty_cache()
        results.append(allocator.stats())
    return results
