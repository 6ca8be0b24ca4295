"""Blocks of logits as floats, and what their rows come to: the one pass itself."""

import threading
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_gpu_ops.cpu.selection import Found, Groups, candidates, joined
from tokenbus_gpu_ops.cpu.values import Doubles, Floats, floats
from tokenbus_gpu_ops.plan import Index
from tokenbus_gpu_ops.tensor import Tensor

BLOCK = 1 << 18
"""Logits at a time: a megabyte of floats, which is still near when it is needed again."""
_WIDE = 4096
"""From so many logits a row, counting row by row takes less than counting all rows at once."""
_kept = threading.local()


class Totals(NamedTuple):
    """What the logits of some rows come to."""

    largest: Floats
    sums: Doubles
    above: Index
    found: Found | None

    @property
    def logs(self) -> Doubles:
        """The logarithm of each row's sum of exponentials."""
        logs: Doubles = self.largest.astype(np.float64) + np.log(self.sums)
        return logs


class Blocks:
    """The logits, and memory for one block of them."""

    def __init__(self, logits: Tensor) -> None:
        """Take the logits where they are."""
        self.logits = logits
        self.view = logits.host_view()
        self.vocabulary = logits.shape[1]
        self.rows_at_once = max(1, BLOCK // max(1, self.vocabulary))
        self._floats = _memory("floats")
        self._powers = _memory("powers")

    def at(self, rows: Index, ids: npt.NDArray[np.int32]) -> Floats:
        """Return one logit of each row as a float."""
        return floats(self.view[rows, ids], self.logits.dtype, np.empty(rows.size, np.float32))

    def pass_over(self, rows: Index, sampled: Floats, most: int) -> Totals:
        """Go through some rows once, a block of the vocabulary at a time."""
        largest = np.full(rows.size, -np.inf, np.float32)
        sums = np.zeros(rows.size)
        above = np.zeros(rows.size, np.intp)
        found = []
        for begin in range(0, self.vocabulary, BLOCK):
            logits = self._block(rows, begin, min(begin + BLOCK, self.vocabulary))
            groups = Groups.of(logits) if most else None
            higher = np.maximum(largest, (logits if groups is None else groups.largest).max(axis=1))
            references = np.where(higher == -np.inf, np.float32(0), higher)
            before = sums * np.exp(largest.astype(np.float64) - references)
            sums = np.where(largest == -np.inf, 0.0, before) + self._sums(logits, references)
            largest = higher
            above += _count_above(logits, sampled)
            if groups is not None:
                part = candidates(logits, groups, min(most, logits.shape[1]))
                found.append(part._replace(ids=part.ids + begin))
        return Totals(largest, sums, above, joined(found) if found else None)

    def _block(self, rows: Index, begin: int, end: int) -> Floats:
        first = int(rows[0])
        follows = rows.size == 1 or bool((np.diff(rows) == 1).all())
        chosen = self.view[first : first + rows.size, begin:end] if follows else self.view[rows, begin:end]
        return floats(chosen, self.logits.dtype, self._floats)

    def _sums(self, logits: Floats, references: Floats) -> Doubles:
        """Return each row's sum of exponentials, relative to its reference."""
        powers = self._powers[: logits.size].reshape(logits.shape)
        np.subtract(logits, references[:, None], out=powers)
        np.exp(powers, out=powers)
        sums: Doubles = powers.sum(axis=1).astype(np.float64)
        return sums


def _memory(name: str) -> Floats:
    """Return memory for one block, a thread's own and the same each time: the first touch of new memory is slow."""
    found: Floats | None = getattr(_kept, name, None)
    if found is None:
        found = np.empty(BLOCK, np.float32)
        setattr(_kept, name, found)
    return found


def _count_above(logits: Floats, limits: Floats) -> Index:
    if logits.shape[1] < _WIDE:
        counts: Index = np.count_nonzero(logits > limits[:, None], axis=1)
        return counts
    return np.array([np.count_nonzero(row > limit) for row, limit in zip(logits, limits, strict=True)], np.intp)
