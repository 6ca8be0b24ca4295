"""AcceptedTokens: stores the accepted token ids of open requests, so that another worker can continue a request."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_MERGED = 256
"""Number of steps that are merged into one array."""
_SPARE = 65_536
"""Number of tokens of ended requests above which the arrays are compacted."""
Ids = npt.NDArray[np.uint32]
Serials = npt.NDArray[np.int64]


class _Rows(NamedTuple):
    """Token ids of several rows; row `i` belongs to the request `serials[i]`, and has the next `counts[i]` ids."""

    serials: Serials
    counts: npt.NDArray[np.intp]
    token_ids: Ids


_NOTHING = _Rows(np.zeros(0, np.int64), np.zeros(0, np.intp), np.zeros(0, np.uint32))


class AcceptedTokens:
    """Stores whole steps, so that adding a step costs about the same for one row as for hundreds.

    Each request has a serial number, which the client never reuses.
    """

    def __init__(self) -> None:
        self._steps: list[_Rows] = []
        self._merged: list[_Rows] = []
        """Merged steps with one row per request, ordered by serial."""
        self._open: set[int] = set()
        self._size = self._dead = 0

    def open(self, serial: int) -> None:
        self._open.add(serial)

    def add(self, serials: Serials, counts: npt.NDArray[np.integer], token_ids: Ids) -> None:
        self._steps.append(_Rows(serials, counts.astype(np.intp), token_ids.copy()))
        self._size += token_ids.size
        if len(self._steps) >= _MERGED:
            self._merged.append(self._living(self._steps))
            self._steps = []

    def of(self, serial: int) -> Ids:
        """Return a request's tokens in order."""
        if self._steps or len(self._merged) != 1:
            self._compact()
        (rows,) = self._merged
        place = int(np.searchsorted(rows.serials, serial))
        if place == rows.serials.size or rows.serials[place] != serial:
            return np.zeros(0, np.uint32)
        begin = int(rows.counts[:place].sum())
        return rows.token_ids[begin : begin + int(rows.counts[place])]

    def close(self, serial: int, tokens: int) -> None:
        """Forget a request; `tokens` is the number of its tokens."""
        self._open.remove(serial)
        self._dead += tokens
        if self._dead > _SPARE and 2 * self._dead > self._size:
            self._compact()

    def _compact(self) -> None:
        self._merged, self._steps = [self._living([*self._merged, *self._steps])], []
        self._dead = 0

    def _living(self, parts: list[_Rows]) -> _Rows:
        """Return one row per open request, ordered by serial; a request's tokens keep their order."""
        if not parts:
            return _NOTHING
        serials, counts, token_ids = map(np.concatenate, zip(*parts, strict=True))
        is_open = np.isin(serials, np.fromiter(self._open, np.int64))
        begins = np.cumsum(counts) - counts
        serials, counts, begins = serials[is_open], counts[is_open], begins[is_open]
        order = np.argsort(serials, kind="stable")
        serials, counts, begins = serials[order], counts[order], begins[order]
        firsts = np.flatnonzero(np.diff(serials, prepend=-1))
        # `sources` has the index of each token in the old array; the tokens of a row stay together.
        sources = np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        dropped = token_ids.size - sources.size
        self._size, self._dead = self._size - dropped, self._dead - dropped
        return _Rows(serials[firsts], np.add.reduceat(counts, firsts), token_ids[sources])
