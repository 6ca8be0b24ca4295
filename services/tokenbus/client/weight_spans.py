"""WeightSpans: the weight versions that computed a request's tokens, across weight updates."""

from collections.abc import Container, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_NOTHING = (b"", 0)


class WeightSpan(NamedTuple):
    """Consecutive tokens of a request that were computed with one weight version.

    Example:
        span = tokenbus.WeightSpan(weight_version=7, begin=0, end=12)
        assert span.end - span.begin == 12
    """

    weight_version: int
    """Weight version, or 0 if unknown."""
    begin: int
    """Position of the span's first token."""
    end: int
    """Position after the span's last token."""


class WeightSpans:
    """Records where each request's weight version changes, beginning with the first step that names a version."""

    def __init__(self) -> None:
        self._starts: dict[int, list[tuple[int, int]]] = {}
        """Pairs of weight version and first position, by request."""
        self._last = _NOTHING

    def note(
        self,
        version: int,
        request_ids: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.uint32],
        known: Container[int] | None = None,
    ) -> None:
        """Record the new rows of a step, or only the rows of the requests in `known`.

        Most steps have the same requests and version as the previous step, and change nothing.
        """
        if not version and not self._starts:
            return
        rows = request_ids.tobytes(), version
        if rows == self._last:
            return
        self._last = rows
        found = zip(request_ids.tolist(), positions.tolist(), strict=True)
        self._note(version, found if known is None else (each for each in found if each[0] in known))

    def note_row(self, version: int, request_id: int, position: int) -> None:
        if version or self._starts:
            self._note(version, [(request_id, position)])

    def _note(self, version: int, rows: Iterable[tuple[int, int]]) -> None:
        for request_id, position in rows:
            starts = self._starts.setdefault(request_id, [])
            if starts and starts[-1][1] == position:
                starts.pop()  # the previous version has not computed any token
            if not starts or starts[-1][0] != version:
                starts.append((version, position))

    def of(self, request_id: int, end: int) -> tuple[WeightSpan, ...]:
        """Return the spans of a request's tokens before a position, or nothing if no step named a version."""
        starts = self._starts.get(request_id, [])
        if starts and starts[0][1]:
            starts = [(0, 0), *starts]  # the version is unknown before the first step with a version or after a resume
        ends = [begin for _, begin in starts[1:]] + [end] * bool(starts)
        spans = (WeightSpan(version, begin, until) for (version, begin), until in zip(starts, ends, strict=True))
        return tuple(span for span in spans if span.end > span.begin)

    def forget(self, request_id: int) -> None:
        if self._starts.pop(request_id, None) is not None:
            self._last = _NOTHING
