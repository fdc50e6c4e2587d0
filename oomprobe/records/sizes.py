"""The sizes that a search may try."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes that may be tried: `first`, ``first + step``, ... up to `last` (None: no end)."""

    first: int
    last: int | None
    step: int

    @classmethod
    def between_limits(cls, min_batch: int, max_batch: int | None, multiple_of: int) -> Sizes:
        """Return the multiples of `multiple_of` within both limits.

        Examples:
            >>> Sizes.between_limits(5, 100, 8)
            Sizes(first=8, last=96, step=8)
        """
        first = -(-min_batch // multiple_of) * multiple_of
        last = None if max_batch is None else max_batch - max_batch % multiple_of
        return cls(first=first, last=last, step=multiple_of)

    def up(self, size: int, distance: int) -> int:
        """Return ``size + distance``, but at most `last`."""
        return self._at_most_last(size + distance)

    def nearest(self, size: int) -> int:
        """Return the size nearest to a number, from below unless that is less than `first`."""
        return max(self.first, self._at_most_last(size // self.step * self.step))

    def _at_most_last(self, size: int) -> int:
        if self.last is None:
            return size
        return min(size, self.last)

    def down(self, size: int, divisor: int) -> int:
        """Return ``size / divisor``, rounded down to a size, but at least `first`."""
        return max(self.first, size // divisor // self.step * self.step)

    def middle(
        self, good: int | None, bad: int, *, geometric: bool = False, place: float = 1 / 2
    ) -> int | None:
        """Return a size halfway between, or None if the two are adjacent; `geometric` halves the ratio of a wide bracket.

        At another `place` than 1/2, the size divides the bracket there.
        """
        low = self.first - self.step if good is None else good
        count = (bad - low) // self.step
        if count <= 1:
            return None
        steps = int(place * count)
        if geometric and low > 0 and bad > 2 * low:
            steps = (math.isqrt(low * bad) - low) // self.step
        return low + max(1, steps) * self.step
