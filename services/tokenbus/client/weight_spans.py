"""WeightSpans: which versions of the weights computed which tokens of a request that lived through an update."""

from collections.abc import Container, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_NOTHING = (b"", 0)


class WeightSpan(NamedTuple):
    """Some tokens of a request, one after the other, that one version of the weights computed.

    Example:
        span = tokenbus.WeightSpan(weight_version=7, begin=0, end=12)
        assert span.end - span.begin == 12
    """

    weight_version: int
    """The version; 0: not known."""
    begin: int
    """The position of the first of them."""
    end: int
    """The position behind the last of them."""


class WeightSpans:
    """Notes where the version changes in each request's tokens; while no step names a version, nothing is noted."""

    def __init__(self) -> None:
        self._starts: dict[int, list[tuple[int, int]]] = {}
        """By request, each version and the position of its first token."""
        self._last = _NOTHING

    def note(
        self,
        version: int,
        keys: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.uint32],
        known: Container[int] | None = None,
    ) -> None:
        """Note a step's rows, each new to its request, or those of the requests that are known.

        Most steps have the requests and the version of the one before.
        """
        if not version and not self._starts:
            return
        rows = keys.tobytes(), version
        if rows == self._last:
            return
        self._last = rows
        found = zip(keys.tolist(), positions.tolist(), strict=True)
        self._note(version, found if known is None else (each for each in found if each[0] in known))

    def note_row(self, version: int, key: int, position: int) -> None:
        """Note one row."""
        if version or self._starts:
            self._note(version, [(key, position)])

    def _note(self, version: int, rows: Iterable[tuple[int, int]]) -> None:
        for key, position in rows:
            starts = self._starts.setdefault(key, [])
            if starts and starts[-1][1] == position:
                starts.pop()  # no token came of that version
            if not starts or starts[-1][0] != version:
                starts.append((version, position))

    def of(self, key: int, end: int) -> tuple[WeightSpan, ...]:
        """Return the spans of a request's tokens before a position; none where no step named a version."""
        starts = self._starts.get(key, [])
        if starts and starts[0][1]:
            starts = [(0, 0), *starts]  # before any step named a version, or this side took the request up
        ends = [begin for _, begin in starts[1:]] + [end] * bool(starts)
        spans = (WeightSpan(version, begin, until) for (version, begin), until in zip(starts, ends, strict=True))
        return tuple(span for span in spans if span.end > span.begin)

    def forget(self, key: int) -> None:
        """Note nothing of a request any more."""
        if self._starts.pop(key, None) is not None:
            self._last = _NOTHING
