"""Steps that do no work, or the same work whatever the batch size: they have no largest batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oomprobe.errors import UnreliableError
from oomprobe.result import Phase, Trial
from oomprobe.search import Sizes
from oomprobe.work import Work

DOUBLINGS = 3  # over which a step that uses its batch size must show a higher peak or more work
ENDLESS_BATCH = 2**40  # a size that no memory holds: what gets here is random, or limited by something else
# A peak that moved by more than its noise is proof enough; resident memory of a host process is the noisy one.
NOISE_BYTES = {"device": 0, "host": 16 * 2**20}

WorkAt = Callable[[int], Work | None]


class Idle:
    """Looks after each trial of grow whether growing on would be for nothing.

    Args:
        trials: Filled with those that ran.
        sizes: That may be tried.
        work_at: Counts the work of one call at a size; None where it does not run.
        kind: ``"host"`` or ``"device"``, for the noise of a peak.
    """

    def __init__(self, trials: Sequence[Trial], sizes: Sizes, work_at: WorkAt, *, kind: str) -> None:
        self._trials, self._sizes, self._work_at, self._noise_bytes = trials, sizes, work_at, NOISE_BYTES[kind]
        # The size whose work was counted last: the next look begins there.
        self._last: tuple[int, Work | None] = (0, None)

    def refuse(self, *, nothing_stepped: bool) -> None:
        """Raise where growing on would be for nothing.

        Args:
            nothing_stepped: Whether no optimizer was seen.

        Raises:
            UnreliableError: the step dispatches no torch operator, or ignores its batch size.
        """
        grown = [trial for trial in self._trials if trial.phase is Phase.GROW and trial.passed]
        if len(grown) == 1 and nothing_stepped:
            self._refuse_nothing(self._work_at(grown[0].batch_size))
        if len(grown) > DOUBLINGS and (len(grown) - 1) % DOUBLINGS == 0:
            self._refuse_same(grown[-1 - DOUBLINGS], grown[-1])

    def _refuse_nothing(self, work: Work | None) -> None:
        if work is not None and work.operators == 0:
            raise UnreliableError(
                "the step dispatched no torch operator, so there is nothing to measure: does it run the model, or has "
                "its data loader run out?",
                trials=tuple(self._trials),
            )

    def _refuse_same(self, then: Trial, now: Trial) -> None:
        if now.batch_size >= ENDLESS_BATCH:
            raise UnreliableError(
                f"batch {now.batch_size} still runs, so memory is not what ends this: the step ignores batch_size. "
                "Pass max_batch",
                trials=tuple(self._trials),
            )
        if (now.peak_allocated_bytes or 0) > (then.peak_allocated_bytes or 0) + self._noise_bytes:
            return
        size, before = self._last
        if size != then.batch_size or before is None:
            before = self._work_at(then.batch_size)
        self._last = now.batch_size, self._work_at(now.batch_size)
        further = self._sizes.up(now.batch_size, now.batch_size)  # a step may round up to chunks
        if before is None or self._last[1] != before or self._work_at(further) != before:
            return
        first = _first_with(before, self._sizes, then.batch_size, self._work_at)
        raise UnreliableError(
            f"batch {first} and batch {now.batch_size} do the same work ({before.operators} operators, "
            f"{before.elements} elements) in the same memory: the step ignores batch_size, or its data ends before. "
            f"If it is the data, pass max_batch={first}; if the step rounds up, as padding does, pass "
            f"min_batch={further} or the size it rounds to",
            trials=tuple(self._trials),
        )


def _first_with(work: Work, sizes: Sizes, same: int, work_at: WorkAt) -> int:
    """The smallest size that does this work, where `same` does: the end of the data."""
    less = sizes.first - sizes.step
    while (middle := sizes.middle(less, same)) is not None:
        if work_at(middle) == work:
            same = middle
        else:
            less = middle
    return same
