"""What an allocator does is recorded on a tape, whose replay does the same; also with other names, and in a file."""

import random

import pytest

from oomprobe.allocator.caching import CachingAllocator
from oomprobe.allocator.pools import Pools
from oomprobe.allocator.settings import AllocatorSettings
from oomprobe.tape import calls as tapes
from oomprobe.tape.shapes import name_by_rank

MIB = 2**20
SETTINGS = [AllocatorSettings(roundup_power2_divisions=(steps,) * 16) for steps in (0, 4)]
KINDS = ["ask"] * 8 + ["free"] * 6 + ["kernel", "switch", "share", "empty", "set", "pool"]


def scratch(more, nbytes):
    """Hold a block until the end, and another for a moment before the result and after it."""
    return nbytes, more * nbytes, -1, tapes.RESULT, 300, -1


KERNEL = tapes.Kernel(scratch, (3,), 1)


class Recorder:
    """Makes random requests of an allocator, and records them call by call."""

    def __init__(self, seed):
        self.draw, self.tape, self.allocator = (
            random.Random(seed),
            tapes.Tape(),
            CachingAllocator(2**34),
        )
        before = [self.allocator.malloc(nbytes) for nbytes in (512, 5 * MIB, 30 * MIB)]
        self.began = self.allocator.copy(), {(1, at): block for at, block in enumerate(before)}
        self.live = dict(zip(self.tape.start_trial(3), before, strict=True))
        self.sizes, self.peak_bytes, self.pools = {}, 0, 0

    def ask(self, nbytes):
        name = self.tape.allocated(nbytes)
        self.live[name], self.sizes[name] = self.allocator.malloc(nbytes), nbytes
        self.peak_bytes = max(self.peak_bytes, sum(self.sizes.values()))

    def act(self, kind):
        tape, allocator, stream = self.tape, self.allocator, self.draw.randrange(3)
        nbytes = self.draw.choice([0, 100, 5000, MIB, 3 * MIB, 9 * MIB, 25 * MIB])
        # What was there before can be freed by the first call only.
        names = [name for name in self.live if name[0] or tape.call_number == 1]
        name = self.draw.choice(names or [None])
        if kind == "ask":
            self.ask(nbytes)
        elif kind == "kernel":
            index = tape.launched([nbytes + 1])
            tape.kernel(KERNEL, 0, index)
            first, second = allocator.malloc(nbytes + 1), allocator.malloc(3 * (nbytes + 1))
            self.peak_bytes = max(self.peak_bytes, sum(self.sizes.values()) + 4 * (nbytes + 1))
            allocator.free(second)
            self.sizes[None] = nbytes + 1
            self.ask(nbytes)
            tape.kernel(KERNEL, 1, index)
            allocator.free(allocator.malloc(300))
            allocator.free(first)
            del self.sizes[None]
        elif kind == "switch":
            tape.switched(stream)
            allocator.use_stream(stream)
        elif kind == "empty":
            tape.cache_released()
            allocator.empty_cache()
        elif kind == "set":
            tape.changed(SETTINGS[stream > 0])
            allocator.set(SETTINGS[stream > 0])
        elif kind == "pool":
            self.pools += 1
            for act, more in ((Pools.make, {"no_split": True}), (Pools.use, {}), (Pools.leave, {})):
                tape.pooled(act, (self.pools,), **more)
                act(allocator.pools, self.pools, **more)
                if act == Pools.use:
                    self.ask(nbytes)
        elif name and kind == "free":
            tape.freed(name)
            allocator.free(self.live.pop(name))
            self.sizes.pop(name, 0)
        elif name and kind == "share":
            tape.shared(name, stream)
            allocator.record_stream(self.live[name], stream)

    def calls(self, count):
        """Return calls, and the allocator's figures after each."""
        calls, figures = [], []
        for _ in range(count):
            self.tape.start()
            for _ in range(self.draw.randrange(40)):
                self.act(self.draw.choice(KINDS))
            self.allocator.synchronize()
            calls.append(self.tape.finish())
            figures.append(self.allocator.stats())
        return calls, figures


@pytest.mark.parametrize("seed", range(8))
def test_a_replay_does_what_was_recorded(seed, tmp_path):
    recorder = Recorder(seed)
    calls, figures = recorder.calls(12)
    tapes.write_calls(calls, tmp_path / "calls")
    for told in (
        calls,
        tapes.read_calls(tmp_path / "calls"),
        name_by_rank([*calls, tapes.RecordedCall((), ())]),
    ):
        allocator, live = recorder.began[0].copy(), recorder.began[1]
        for call, expected in zip(told, figures, strict=True):
            live = tapes.replay_call(allocator, call, live)
            assert allocator.stats() == expected
    assert tapes.peak_bytes(calls) == recorder.peak_bytes
