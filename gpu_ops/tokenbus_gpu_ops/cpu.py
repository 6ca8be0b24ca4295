"""The CPU implementation in numpy, with the same results as the kernels.

Each row is read once, one block at a time. The alternatives are found in the groups with the largest maxima.
"""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_gpu_ops.columns import Body, FaultReason
from tokenbus_gpu_ops.extras import NOWHERE, Extras
from tokenbus_gpu_ops.plan import Index, Plan
from tokenbus_gpu_ops.tensor import Tensor

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

FLOOR = np.float32(-9999.0)
"""The contract's replacement for minus infinity, and the lower limit of all values."""
BLOCK = 1 << 18
"""The number of logits per block. A block of floats has a megabyte and stays in the cache."""
_WIDE = 4096
"""The row length from which counting the logits row by row is faster than counting all rows at once."""
_GROUP = 64
_FEWEST_GROUPS = 4
"""The minimum number of groups per alternative. With fewer groups, the search would find too many candidates."""
_NEGLIGIBLE = np.float32(-200)
"""An exponent whose exponential underflows to zero. Masked logits get this exponent."""
_kept = threading.local()


def compute(  # noqa: PLR0913, PLR0917 - the properties of one call
    plan: Plan,
    body: Body,
    logits: Tensor,
    ids: npt.NDArray[np.int32],
    extras: Extras | None,
    other: Tensor | None,
    *,
    as_logits: bool,
) -> npt.NDArray[np.uint8]:
    """Compute the results of all tokens, and return the memory that contains them."""
    memory = np.zeros(body.size, np.uint8)
    for place in body.places:
        memory[place.at - len(place.prefix) : place.at] = np.frombuffer(place.prefix, np.uint8)
    columns = [place.view(memory) for place in body.places]
    columns[0][:] = ids
    faults, sampled = memory[: body.faults], ids[plan.scored_tokens]
    items = None if extras is None else extras.items[: plan.scored]
    own = _Rows(plan.scored_rows, sampled, plan.scored_top_ks, plan.alternatives_at, faults[: plan.scored], items)
    more = None
    if extras is not None:
        more = _More(extras.given_token_ids, *(place.view(memory) for place in body.extras))
    with np.errstate(all="ignore"):  # numpy need not warn: each faulty row gets a fault reason
        _put(own, _Blocks(logits), columns, more, as_logits=as_logits)
        if extras is not None and other is not None:
            of = extras.others
            none = np.zeros(of.size, np.intp)
            places = extras.items[plan.scored :]
            second = _Rows(plan.scored_rows[of], sampled[of], none, none, faults[plan.scored :], places)
            _put(second, _Blocks(other), None, more, as_logits=as_logits)
    return memory


class _Rows(NamedTuple):
    """The rows to read from one tensor, with the ids and sizes for each row."""

    rows: Index
    ids: npt.NDArray[np.int32]
    """The sampled id of each row."""
    wanted: Index
    """The number of alternatives of each row."""
    alternatives_at: Index
    """The offset of each row's alternatives."""
    faults: npt.NDArray[np.uint8]
    extras: npt.NDArray[Any] | None

    def part(self, at: slice) -> "_Rows":
        return _Rows(*(None if each is None else each[at] for each in self))  # type: ignore[arg-type]


class _More(NamedTuple):
    """The given ids of the requests, and the output columns for extra scores."""

    given_ids: npt.NDArray[np.uint32]
    other_logprobs: npt.NDArray[Any]
    entropies: npt.NDArray[Any]
    given_logprobs: npt.NDArray[Any]
    mask_sizes: npt.NDArray[Any]
    mask_slots: npt.NDArray[Any]


def _put(
    all_rows: _Rows,
    blocks: "_Blocks",
    columns: Sequence[npt.NDArray[Any]] | None,
    more: _More | None,
    *,
    as_logits: bool,
) -> None:
    """Write the results of some rows. If `columns` is None, write only the extra scores."""
    for begin in range(0, all_rows.rows.size, blocks.rows_at_once):
        at = slice(begin, begin + blocks.rows_at_once)
        part = all_rows.part(at)
        rows, ids, wanted, _, faults, extras = part
        sampled = blocks.floats(blocks.view[rows, ids], np.empty(rows.size, np.float32))
        with_entropy = extras is not None and bool((extras["entropy_at"] != NOWHERE).any())
        totals = blocks.pass_over(rows, sampled, int(wanted.max(initial=0)), with_entropy=with_entropy)
        faults[:] = blocks.faults(rows, totals.largest)
        logs = totals.largest.astype(np.float64) + np.log(totals.sums)
        values = np.where(faults == 0, _values_of(sampled, logs, as_logits=as_logits), np.float32(np.nan))
        if columns:
            columns[1][at] = values
            columns[2][at] = np.where(faults == 0, totals.above + 1, 0)
        elif extras is not None and more is not None:
            _put_each(more.other_logprobs, extras["value_at"], values)
        if more is not None:
            _put_more(more, blocks, part, totals, logs, as_logits=as_logits)
        if columns and totals.found is not None:
            _put_alternatives(columns[3:], blocks, part, totals.found, logs, as_logits=as_logits)


def _put_more(  # noqa: PLR0913 - inputs and outputs
    more: _More, blocks: "_Blocks", part: _Rows, totals: "_Totals", logs: Doubles, *, as_logits: bool
) -> None:
    rows, faults, extras = part.rows, part.faults, part.extras
    if extras is None:
        return
    entropies = np.maximum(np.log(totals.sums) - totals.weighted / totals.sums, 0)
    _put_each(more.entropies, extras["entropy_at"], np.where(faults == 0, entropies, np.nan))
    for token in np.flatnonzero(extras["given_count"]):
        _, _, ids_at, given_at, count, *_ = extras[token].tolist()
        logits = blocks.view[rows[token], more.given_ids[ids_at : ids_at + count]]
        logits = blocks.floats(logits, np.empty(count, np.float32))
        values = _values_of(logits, logs[token : token + 1], as_logits=as_logits)
        more.given_logprobs[given_at : given_at + count] = np.nan if faults[token] else values
    for token in np.flatnonzero((extras["mask_bound"] > 0) & (faults == 0)):
        *_, mask_at, ids_at, bound = extras[token].tolist()
        unmasked = np.flatnonzero(blocks.row(int(rows[token])) > -np.inf)
        more.mask_sizes[mask_at] = unmasked.size
        if unmasked.size <= bound:
            more.mask_slots[ids_at : ids_at + unmasked.size] = unmasked


def _put_each(into: npt.NDArray[Any], places: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
    there = places != NOWHERE
    into[places[there]] = values[there]


class _Groups(NamedTuple):
    """The maximum of each group of logits.

    Group g consists of every `across`-th logit, beginning with logit g. One more group has the remaining logits.
    Neighbouring logits are in different groups, so that numpy finds the maxima of all groups at once.
    """

    largest: Floats
    across: int
    width: int

    @classmethod
    def of(cls, logits: Floats) -> "_Groups":
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
        """Return a row of token ids for each of the groups, and a mask that excludes ids beyond the vocabulary."""
        is_rest = (groups == self.across)[:, None]
        within = np.arange(_GROUP)
        ids = np.where(is_rest, self.across * _GROUP + within, groups[:, None] + self.across * within)
        there = ids < self.width
        return np.where(there, ids, 0), there


class _Found(NamedTuple):
    """The candidates for the alternatives of some rows. Each candidate has a row, an id and a logit."""

    rows: Index
    ids: Index
    logits: Floats
    dropped: Floats
    """The largest omitted logit of each row, or minus infinity if no logit was omitted."""


def _candidates(logits: Floats, groups: _Groups, most: int) -> _Found:
    """Return the `most` largest logits of each row, all that equal the smallest of these, and perhaps some others."""
    width = logits.shape[1]
    count = groups.largest.shape[1]
    if count < _FEWEST_GROUPS * most:
        bounds = np.partition(logits, width - most, axis=1)[:, width - most]
        above = logits >= bounds[:, None]
        rows, ids = np.nonzero(above)
        return _Found(rows, ids, logits[rows, ids], _largest_of(~above, logits))
    bounds = np.partition(groups.largest, count - most, axis=1)[:, count - most]
    chosen = groups.largest >= bounds[:, None]
    dropped = _largest_of(~chosen, groups.largest)
    rows, numbers = np.nonzero(chosen)
    ids, there = groups.ids_in(numbers)
    found = logits[rows[:, None], ids]
    above = there & (found >= bounds[rows, None])
    np.maximum.at(dropped, rows, _largest_of(there & ~above, found))
    lines, columns = np.nonzero(above)
    return _Found(rows[lines], ids[lines, columns], found[lines, columns], dropped)


def _largest_of(which: npt.NDArray[np.bool_], values: Floats) -> Floats:
    largest: Floats = np.where(which, values, np.float32(-np.inf)).max(axis=1)
    return largest


class _Totals(NamedTuple):
    """For some rows, the largest logit and the sums and counts over all logits."""

    largest: Floats
    sums: Doubles
    """The sum of exp(logit - largest logit) over the row."""
    above: Index
    """The number of logits above the sampled logit."""
    weighted: Doubles
    """The sum of x * exp(x) with x = logit - largest logit, from which the entropy is computed."""
    found: _Found | None


class _Blocks:
    """The logits of a call, with memory to convert one block of logits to floats."""

    def __init__(self, logits: Tensor) -> None:
        self.view = logits.host_view()
        self._dtype = logits.dtype
        self._vocabulary = logits.shape[1]
        self.rows_at_once = max(1, BLOCK // max(1, self._vocabulary))
        # Each thread reuses its memory, because the first access to new memory is slow.
        if not hasattr(_kept, "memory"):
            _kept.memory = tuple(np.empty(BLOCK, np.float32) for _ in range(3))
        self._floats, self._powers, self._exponents = _kept.memory

    def floats(self, logits: npt.NDArray[Any], into: Floats) -> Floats:
        """Return `logits` unchanged if they are float32. Otherwise, convert them to float32 in the memory `into`."""
        if self._dtype == "float32":
            return logits
        room = into[: logits.size].reshape(logits.shape)
        if self._dtype == "bfloat16":
            np.left_shift(logits, 16, out=room.view(np.uint32), dtype=np.uint32)
        else:
            room[...] = logits
        return room

    def row(self, row: int) -> Floats:
        return self.floats(self.view[row], np.empty(self._vocabulary, np.float32))

    def pass_over(self, rows: Index, sampled: Floats, most: int, *, with_entropy: bool = False) -> _Totals:
        """Compute the totals of some rows in one pass over the vocabulary, one block at a time."""
        weighted = np.zeros(rows.size)
        largest = np.full(rows.size, -np.inf, np.float32)
        sums = np.zeros(rows.size)
        above = np.zeros(rows.size, np.intp)
        parts: list[_Found] = []
        first = int(rows[0])
        follows = rows.size == 1 or bool((np.diff(rows) == 1).all())
        for begin in range(0, self._vocabulary, BLOCK):
            columns = slice(begin, min(begin + BLOCK, self._vocabulary))
            chosen = self.view[first : first + rows.size, columns] if follows else self.view[rows, columns]
            logits = self.floats(chosen, self._floats)
            groups = _Groups.of(logits) if most else None
            higher = np.maximum(largest, (logits if groups is None else groups.largest).max(axis=1))
            references = np.where(higher == -np.inf, np.float32(0), higher)
            by = np.maximum(largest.astype(np.float64) - references, _NEGLIGIBLE)
            before = sums * np.exp(by)
            powers = self._powers[: logits.size].reshape(logits.shape)
            np.subtract(logits, references[:, None], out=powers)
            exponents = self._exponents[: logits.size].reshape(logits.shape)
            if with_entropy:
                np.maximum(powers, _NEGLIGIBLE, out=exponents)
            np.exp(powers, out=powers)
            if with_entropy:
                np.multiply(powers, exponents, out=exponents)
                weighted = np.exp(by) * (weighted + by * sums) + exponents.sum(axis=1)
            sums = np.where(largest == -np.inf, 0.0, before) + powers.sum(axis=1).astype(np.float64)
            largest = higher
            above += _count_above(logits, sampled)
            if groups is not None:
                part = _candidates(logits, groups, min(most, logits.shape[1]))
                parts.append(part._replace(ids=part.ids + begin))
        if not parts:
            return _Totals(largest, sums, above, weighted, None)
        found = parts[0]
        if len(parts) > 1:
            rows, ids, logits = (np.concatenate([part[which] for part in parts]) for which in range(3))
            found = _Found(rows, ids, logits, np.maximum.reduce([part.dropped for part in parts]))
        return _Totals(largest, sums, above, weighted, found)

    def faults(self, rows: Index, largest: Floats) -> npt.NDArray[np.uint8]:
        """Return the fault reason of each row, or zero for a row without fault."""
        faults = np.zeros(rows.size, np.uint8)
        faults[largest == -np.inf] = FaultReason.ALL_MASKED
        for place in np.flatnonzero(np.isnan(largest) | (largest == np.inf)):
            # If a row has infinity and NaN, report infinity, because the kernels' maximum ignores NaN.
            infinite = bool((self.row(int(rows[place])) == np.inf).any())
            faults[place] = FaultReason.INFINITE if infinite else FaultReason.NOT_A_NUMBER
        return faults


def _count_above(logits: Floats, limits: Floats) -> Index:
    if logits.shape[1] < _WIDE:
        counts: Index = np.count_nonzero(logits > limits[:, None], axis=1)
        return counts
    return np.array([np.count_nonzero(row > limit) for row, limit in zip(logits, limits, strict=True)], np.intp)


def _values_of(logits: Floats, logs_of_sums: Doubles, *, as_logits: bool) -> Floats:
    """Return the logprob of each logit, or the logit itself. `logs_of_sums` has the log-sum-exp of each logit's row."""
    if as_logits:
        floored: Floats = np.maximum(logits, FLOOR)
        return floored
    exact = logits.astype(np.float64) - logs_of_sums
    values: Floats = np.maximum(np.minimum(exact, 0.0).astype(np.float32), FLOOR)
    return values


def _put_alternatives(  # noqa: PLR0913 - inputs and outputs
    columns: Sequence[npt.NDArray[Any]], blocks: _Blocks, part: _Rows, found: _Found, logs: Doubles, *, as_logits: bool
) -> None:
    ids, values = columns
    places = part.alternatives_at
    for token in np.flatnonzero(part.faults):
        values[places[token] : places[token] + part.wanted[token]] = np.nan
    wanted = np.where(part.faults == 0, part.wanted, 0)
    found_values = _values_of(found.logits, logs[found.rows], as_logits=as_logits)
    # Select the first alternatives of each row, ordered by value and then by id.
    order = np.lexsort((found.ids, -found_values, found.rows))
    counts = np.bincount(found.rows, minlength=wanted.size)
    within = np.arange(order.size) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = within < wanted[found.rows[order]]
    chosen = order[kept]
    targets = places[found.rows[chosen]] + within[kept]
    ids[targets] = found.ids[chosen]
    values[targets] = found_values[chosen]
    # If an omitted value equals the last selected value, the omitted token may have a lower id.
    some = np.flatnonzero(wanted)
    last = values[places[some] + wanted[some] - 1]
    for token in some[_values_of(found.dropped[some], logs[some], as_logits=as_logits) >= last]:
        at = slice(places[token], places[token] + wanted[token])
        whole = _values_of(blocks.row(int(part.rows[token])), logs[token : token + 1], as_logits=as_logits)
        least = np.partition(whole, whole.size - wanted[token])[whole.size - wanted[token]]
        larger = np.flatnonzero(whole > least)
        best = np.concatenate((larger, np.flatnonzero(whole == least)[: wanted[token] - larger.size]))
        best = best[np.lexsort((best, -whole[best]))]
        ids[at], values[at] = best, whole[best]
