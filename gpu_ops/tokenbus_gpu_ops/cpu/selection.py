"""The largest of each row: by the largest of groups first, so that the rows are gone through but once."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_gpu_ops.cpu.values import Doubles, Floats, values_of
from tokenbus_gpu_ops.plan import Index

_GROUP = 64
_FEWEST_GROUPS = 4
"""For each alternative: with fewer groups than that, too much of a row is above the bound of its groups."""


class Groups(NamedTuple):
    """The largest of every group of logits. Group g has every `across`-th logit from g on; the last has what is left.

    Neighbours are in different groups: so the largest are found element by element, all groups at once.
    """

    largest: Floats
    across: int
    width: int

    @classmethod
    def of(cls, logits: Floats) -> "Groups":
        """Find the largest of each group of each row."""
        rows, width = logits.shape
        across = width // _GROUP
        whole = across * _GROUP
        parts = []
        if across:
            parts.append(np.maximum.reduce(logits[:, :whole].reshape(rows, _GROUP, across), axis=1))
        if whole < width:
            parts.append(np.maximum.reduce(logits[:, whole:], axis=1, keepdims=True))
        return cls(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1), across, width)

    def ids_in(self, groups: Index) -> tuple[Index, npt.NDArray[np.bool_]]:
        """Return the ids of the logits in some groups, a line each, and which of them there are at all."""
        is_rest = (groups == self.across)[:, None]
        within = np.arange(_GROUP)
        ids = np.where(is_rest, self.across * _GROUP + within, groups[:, None] + self.across * within)
        there = ids < self.width
        return np.where(there, ids, 0), there


class Found(NamedTuple):
    """What may be among the largest of some rows: for each element its row, its id and its logit."""

    rows: Index
    ids: Index
    logits: Floats
    dropped: Floats
    """For each row the largest logit that was left out; minus infinity if none was."""


def candidates(logits: Floats, groups: Groups, most: int) -> Found:
    """Return at least the `most` largest of each row, and all that equal the least of them."""
    width = logits.shape[1]
    count = groups.largest.shape[1]
    if count < _FEWEST_GROUPS * most:
        bounds = np.partition(logits, width - most, axis=1)[:, width - most]
        above = logits >= bounds[:, None]
        rows, ids = np.nonzero(above)
        return Found(rows, ids, logits[rows, ids], _largest_of(~above, logits))
    bounds = np.partition(groups.largest, count - most, axis=1)[:, count - most]
    chosen = groups.largest >= bounds[:, None]
    dropped = _largest_of(~chosen, groups.largest)
    rows, numbers = np.nonzero(chosen)
    ids, there = groups.ids_in(numbers)
    found = logits[rows[:, None], ids]
    above = there & (found >= bounds[rows, None])
    np.maximum.at(dropped, rows, _largest_of(there & ~above, found))
    lines, columns = np.nonzero(above)
    return Found(rows[lines], ids[lines, columns], found[lines, columns], dropped)


def joined(parts: list[Found]) -> Found:
    """Return what was found in several parts of the same rows."""
    if len(parts) == 1:
        return parts[0]
    rows, ids, logits = (np.concatenate([part[which] for part in parts]) for which in range(3))
    return Found(rows, ids, logits, np.maximum.reduce([part.dropped for part in parts]))


def first_of_each(rows: Index, ids: Index, values: Floats, wanted: Index) -> tuple[Index, Index]:
    """Return which elements are the first of their rows, by value and then by id, and each one's place in its row."""
    order = np.lexsort((ids, -values, rows))
    counts = np.bincount(rows, minlength=wanted.size)
    places = np.arange(order.size) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = places < wanted[rows[order]]
    return order[kept], places[kept]


def of_one_row(logits: Floats, log_of_sum: Doubles, wanted: int, *, as_logits: bool) -> tuple[Index, Floats]:
    """Return a row's alternatives, looked for among the values themselves: for rows whose values tie."""
    values = values_of(logits, log_of_sum, as_logits=as_logits)
    last = np.partition(values, values.size - wanted)[values.size - wanted]
    larger = np.flatnonzero(values > last)
    ids = np.concatenate((larger, np.flatnonzero(values == last)[: wanted - larger.size]))
    ids = ids[np.lexsort((ids, -values[ids]))]
    return ids, values[ids]


def _largest_of(which: npt.NDArray[np.bool_], values: Floats) -> Floats:
    largest: Floats = np.where(which, values, np.float32(-np.inf)).max(axis=1)
    return largest
