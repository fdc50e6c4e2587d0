"""Private pools of a simulated card: ``torch.cuda.MemPool``, and those of captured graphs.

To replay a graph asks for nothing: its memory is that of its capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from oomprobe.allocator.pools import Pools
from oomprobe.errors import SimulationError
from oomprobe.ground.frames import user_line
from oomprobe.simulation.memory import CardMemory

Handle = tuple[int, int]
GRAPHS = "what CUDA takes for captured graphs beside the pools of their captures"
OWN_ALLOCATOR = (
    "torch.cuda.MemPool at {line} has an allocator of its own, which takes memory past the simulated "
    "one: leave it out, or probe on a real device"
)


class MemPool:
    """A private pool, as ``torch.cuda.MemPool``."""

    memory: CardMemory  # of the card, in a class for each

    def __init__(
        self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        if allocator is not None:
            raise SimulationError(OWN_ALLOCATOR.format(line=user_line()))
        self.id = 0, self.memory.new_pool()
        self.memory.turn(Pools.make, sum(self.id), use_on_oom=use_on_oom, no_split=no_split)

    def __del__(self) -> None:
        if hasattr(self, "id"):
            self.memory.drop_pool(sum(self.id))

    def use_count(self) -> int:
        return self.memory.allocator.pools.users[sum(self.id)]

    def snapshot(self, *_: Any, **__: Any) -> Any:
        cuda: Any = torch.cuda
        return cuda.memory_snapshot()  # which is refused


class CUDAGraph:
    """A graph, which keeps the pool of its capture, and those that were used in it."""

    memory: CardMemory  # of the card, in a class for each
    leave_out: Callable[[str], None]

    def __init__(self, *_: Any, **__: Any) -> None:
        self._pools: list[int] = []
        self._stream = 0

    def __del__(self) -> None:
        self.reset()

    def capture_begin(self, pool: MemPool | Handle | None = None, *_: Any, **__: Any) -> None:
        self.leave_out(GRAPHS)
        self.reset()
        if isinstance(pool, MemPool):
            pool = pool.id
        private = sum(pool) if pool else self.memory.new_pool()
        self._stream = self.memory.allocator.stream
        self._pools.append(private)
        self.memory.turn(Pools.use, private, captures=True)
        self.memory.captured[private] += 1
        self.memory.retained = self._pools

    def capture_end(self) -> None:
        self.memory.retained = None
        self.memory.turn(Pools.leave, self._pools[0])

    def reset(self) -> None:
        if self._pools:
            self.memory.clear_workspaces(self._stream)
        for private in self._pools:
            self.memory.turn(Pools.release, private)
            self.memory.captured[private] -= 1
        self._pools.clear()

    def pool(self) -> Handle:
        return 0, self._pools[0]

    def replay(self, *_: Any, **__: Any) -> None: ...

    instantiate = enable_debug_mode = debug_dump = replay


class Capture:
    """Captures what is asked for inside, as ``torch.cuda.graph``."""

    memory: CardMemory  # of the card, in a class for each

    def __init__(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, *_: Any, **__: Any
    ) -> None:
        self._graph, self._pool = cuda_graph, pool
        self._stream = self.memory.numbers.of_captures() if stream is None else stream.stream_id
        self._before = 0

    def __enter__(self) -> None:
        self.memory.empty_cache(by_step=True)
        self._before = self.memory.allocator.stream
        self.memory.use_stream(self._stream)
        self._graph.capture_begin(self._pool)

    def __exit__(self, *_: object) -> None:
        self._graph.capture_end()
        self.memory.use_stream(self._before)


def pools_of(memory: CardMemory, leave_out: Callable[[str], object]) -> dict[str, Any]:
    """Return what stands for names of ``torch.cuda``."""

    @contextmanager
    def use_mem_pool(pool: MemPool, *_: Any, **__: Any) -> Iterator[None]:
        private = sum(pool.id)
        memory.turn(Pools.use, private)
        if memory.retained is not None and private not in memory.retained:
            memory.retained.append(private)
            memory.turn(Pools.make, private)
            memory.captured[private] += 1
        try:
            yield
        finally:
            memory.turn(Pools.leave, private)
            memory.turn(Pools.release, private)

    of_card = {"memory": memory, "leave_out": staticmethod(leave_out)}
    named = {"MemPool": MemPool, "CUDAGraph": CUDAGraph, "graph": Capture}
    return {
        **{name: type(name, (kind,), of_card) for name, kind in named.items()},
        "use_mem_pool": use_mem_pool,
        "graph_pool_handle": lambda: (0, memory.numbers.next_pool()),
        "is_current_stream_capturing": lambda: memory.allocator.pools.captures > 0,
    }
