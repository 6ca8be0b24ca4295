"""Histogram: how long things took, as counts in a few buckets."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""From a tenth of a millisecond, which is a good step, to what nobody waits for."""


class Histogram:
    """Counts values by their upper bounds. One thread counts; any other may read."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        """Take the buckets' upper bounds, in order."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return each bucket's bound, as text, and how many values are at most that; the last has them all."""
        names = [*map(str, self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(list(self._counts))), strict=True))

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self._counts)
