"""Gradient accumulation: splitting a global batch into micro-batches that fit."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from itertools import islice

from oomprobe.errors import check_size

# A micro-batch under half of what fits wastes more time on kernel launches than an exact split is worth.
GOOD_SHARE = 0.5
MOST_TRIED = 1_000_000  # sizes, the largest first: those of a file may have no end


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntry:
    """``micro_batch * accumulation_steps * world_size == global_batch``.

    Attributes:
        micro_batch: Samples that a rank handles at once; at most the size that fits.
        accumulation_steps: Micro-batches per optimizer step and rank.
        world_size: Ranks.
        global_batch: Samples per optimizer step over all ranks.
        exact: Whether `global_batch` is the one that was requested.
        ran: Whether the probe ran this micro-batch and it passed; otherwise the entry is only arithmetic.
        ran_accumulated: Whether it also ran with gradients accumulating over micro-batches.

    Examples:
        >>> import oomprobe
        >>> result = oomprobe.check_target("oomprobe.demo:wide_mlp", 64, device="sim:1GiB", progress="off")
        >>> best = result.plan(global_batch=1024, world_size=4)[0]
        >>> best.micro_batch, best.accumulation_steps, best.ran, best.ran_accumulated
        (64, 4, True, False)
    """

    micro_batch: int
    accumulation_steps: int
    world_size: int
    global_batch: int
    exact: bool
    ran: bool
    ran_accumulated: bool = False


def plan(
    global_batch: int,
    *,
    world_size: int,
    max_micro_batch: int,
    min_micro_batch: int = 1,
    multiple_of: int = 1,
    ran: Set[tuple[int, int]] = frozenset(),
) -> tuple[PlanEntry, ...]:
    """List ways to reach a global batch, best first; `ran` holds (micro-batch, accumulation steps) that passed.

    An exact split comes first if its micro-batch is at least half of what fits and more than one sample. Otherwise the
    nearest global batches that split well come first, and the exact split last.

    Examples:
        >>> for entry in plan(1009, world_size=1, max_micro_batch=64):
        ...     print(entry.micro_batch, "x", entry.accumulation_steps, "=", entry.global_batch, entry.exact)
        63 x 16 = 1008 False
        64 x 16 = 1024 False
        1 x 1009 = 1009 True
    """
    check_size("global_batch", global_batch)
    check_size("world_size", world_size)
    fitting = range(
        -(-min_micro_batch // multiple_of) * multiple_of, max_micro_batch + 1, multiple_of
    )
    splits = _near_splits(global_batch, world_size, fitting)
    exact = _exact_split(global_batch, world_size, fitting)
    if exact is not None:
        if exact in splits:
            splits.remove(exact)
        is_large = exact[0] / min(max_micro_batch, global_batch // world_size) >= GOOD_SHARE
        if is_large and not (splits and _one_by_one(exact)):
            splits.insert(0, exact)
        else:
            splits.append(exact)
    sizes, accumulated_sizes = {size for size, _ in ran}, {size for size, steps in ran if steps > 1}
    entries = []
    for micro, steps in splits:
        reached = micro * steps * world_size
        entries.append(
            PlanEntry(
                micro_batch=micro,
                accumulation_steps=steps,
                world_size=world_size,
                global_batch=reached,
                exact=reached == global_batch,
                ran=micro in sizes,
                ran_accumulated=micro in accumulated_sizes,
            )
        )
    return tuple(entries)


def _exact_split(global_batch: int, world_size: int, fitting: range) -> tuple[int, int] | None:
    """Return the largest micro-batch that divides a rank's share, and its steps."""
    share, left = divmod(global_batch, world_size)
    if left:
        return None
    fitting_share = reversed(range(fitting.start, min(share + 1, fitting.stop), fitting.step))
    for micro in islice(fitting_share, MOST_TRIED):
        if share % micro == 0:
            return micro, share // micro
    return None


def _near_splits(global_batch: int, world_size: int, fitting: range) -> list[tuple[int, int]]:
    """Return the micro-batches around an even split with the fewest accumulation steps, nearest global batch first.

    If neither is in `fitting`, use its largest micro-batch with one step less, and its smallest with as many. Single samples
    are accumulated only if nothing else is left.
    """
    if not fitting:
        return []
    first, largest, multiple_of = fitting[0], fitting[-1], fitting.step
    steps = -(-global_batch // (largest * world_size))
    below = global_batch // (steps * world_size * multiple_of) * multiple_of
    splits = [(micro, steps) for micro in (below, below + multiple_of) if micro in fitting]
    if not splits:
        splits.append((first, steps))
        if steps > 1:
            splits.append((largest, steps - 1))
    several = [split for split in splits if not _one_by_one(split)]
    return sorted(
        several or splits,
        key=lambda split: (abs(split[0] * split[1] * world_size - global_batch), split),
    )


def _one_by_one(split: tuple[int, int]) -> bool:
    """Return whether a split accumulates single samples."""
    micro, steps = split
    return micro == 1 and steps > 1
