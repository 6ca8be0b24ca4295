"""Shared sampling code: random numbers, distributions, and verification of drafts.

A random number depends only on the request's seed, the token's position and the purpose. A request's output therefore
does not depend on its batch, on preemption or on prompt chunks. Each column of a distribution stands for one token of
the vocabulary or of an engine's shortlist.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]

DRAFT, ACCEPT, FINAL = 1, 2, 3
"""Purposes of random numbers, each encoded in two bits."""
_PURPOSES = np.uint64(4)
_ADDED = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_UNUSED_BITS = np.uint64(11)


def mixed(words: Words) -> Words:
    """Apply splitmix64 to each word."""
    words = words + _ADDED
    words ^= words >> _SHIFTS[0]
    words *= _FACTORS[0]
    words ^= words >> _SHIFTS[1]
    words *= _FACTORS[1]
    words ^= words >> _SHIFTS[2]
    return words


def uniforms(seeds: Words, positions: Ids, purpose: int) -> Floats:
    """Return a random number in [0, 1) per seed and position. Positions have shape [rows] or [rows, positions]."""
    seeds = seeds.reshape(-1, *(1,) * (positions.ndim - 1))
    counters = positions.astype(np.uint64)
    counters *= _PURPOSES
    counters += np.uint64(purpose)
    words = mixed(seeds ^ mixed(counters))
    words >>= _UNUSED_BITS
    return np.asarray(words * 2.0**-53, np.float64)


class SamplingParams(NamedTuple):
    """The sampling parameters of some rows."""

    temperatures: Floats
    """Sampling temperature of each row, where 0 means greedy."""
    top_ks: Ids
    """For each row, how many of the most probable tokens may be sampled, or 0 for all tokens."""
    top_ps: Floats
    seeds: Words

    @property
    def are_plain(self) -> bool:
        """Whether all rows are sampled with the model's unchanged probabilities."""
        return not (self.top_ks.any() or (self.top_ps < 1).any() or (self.temperatures != 1).any())


def distribution(logits: Logits, params: SamplingParams, *, are_sorted: bool = False) -> Floats:
    """Return probabilities after temperature, top-k and top-p. Of equal logits, the lower column ranks first.

    Logits have shape [rows, ..., columns]. If `are_sorted` is set, the columns are already sorted by probability.
    """
    extra = (1,) * (logits.ndim - 1)
    temperatures, top_ks, top_ps = (each.reshape(-1, *extra) for each in params[:3])
    has_greedy = not temperatures.all()
    best: npt.NDArray[np.bool_] | None = None
    if has_greedy:
        best = np.arange(logits.shape[-1]) == (0 if are_sorted else logits.argmax(axis=-1)[..., None])
        if not temperatures.any():
            return np.broadcast_to(best, logits.shape).astype(float, order="C")
    weights = np.subtract(logits, logits[..., :1] if are_sorted else logits.max(axis=-1, keepdims=True), dtype=float)
    if (temperatures != 1).any():
        weights /= np.where(temperatures == 0, 1.0, temperatures) if has_greedy else temperatures
    np.exp(weights, out=weights)
    if top_ks.any() or (top_ps < 1).any():
        order = None if are_sorted else np.argsort(-weights, axis=-1, kind="stable")
        ranked = weights if order is None else np.take_along_axis(weights, order, axis=-1)
        if top_ks.any():
            ranked = ranked * (np.arange(ranked.shape[-1]) < np.where(top_ks == 0, ranked.shape[-1], top_ks))
        if (top_ps < 1).any():
            sums = ranked.cumsum(axis=-1)
            ranked = ranked * ((sums - ranked < top_ps * sums[..., -1:]) | (top_ps == 1))
        if order is None:
            weights = ranked
        else:
            np.put_along_axis(weights, order, ranked, axis=-1)
    if best is not None:
        weights = np.where(temperatures == 0, best, weights)
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def drawn(chances: Floats, numbers: Floats) -> Ids:
    """Sample a column for each row with the row's random number. A column of probability 0 is never sampled."""
    sums = chances.cumsum(axis=-1)
    wanted = np.minimum(numbers * sums[..., -1], np.nextafter(sums[..., -1], 0))
    return np.asarray((sums > wanted[..., None]).argmax(axis=-1), np.int64)


class Drafts(NamedTuple):
    """Draft tokens of each row."""

    columns: Ids
    """Columns of the drafts, left-aligned, of shape [rows, drafts]."""
    chances: Floats
    """Distributions from which the drafts were sampled, of shape [rows, drafts, columns]."""
    counts: Ids


class Verified(NamedTuple):
    """Accepted drafts of each row, followed by one sampled token."""

    columns: Ids
    """Columns of the tokens, left-aligned, of shape [rows, drafts + 1]."""
    counts: Ids
    """Number of tokens in each row."""


def verified(target: Floats, drafts: Drafts, params: SamplingParams, positions: Ids) -> Verified:
    """Verify drafts by rejection sampling (Leviathan, Chen), starting at each row's position.

    `target` has distributions of shape [rows, drafts + 1, columns]. A draft is accepted with probability min(1, target
    / draft). The first rejected draft is replaced by a token sampled from the normalized max(0, target - draft). If all
    drafts are accepted, one more token is sampled from the target. Tokens thus follow the target's distribution.
    """
    rows, most = drafts.columns.shape
    every, place = np.arange(rows), np.arange(most)
    wanted, offered = (each[every[:, None], place, drafts.columns] for each in (target, drafts.chances))
    is_rejected = np.ones((rows, most + 1), np.bool_)
    numbers = uniforms(params.seeds, positions[:, None] + place, ACCEPT)
    np.greater_equal(numbers * offered, wanted, out=is_rejected[:, :-1])
    is_rejected[:, :-1] |= place >= drafts.counts[:, None]
    count = np.argmax(is_rejected, axis=1)
    source = target[every, count]
    rejected = np.flatnonzero(count < drafts.counts)
    if rejected.size:
        rest = np.maximum(source[rejected] - drafts.chances[rejected, count[rejected]], 0)
        # If rounding makes the remainder zero, target and draft are equal, so the target is used.
        source[rejected] = np.where(rest.sum(axis=-1, keepdims=True) > 0, rest, source[rejected])
    columns = np.zeros((rows, most + 1), np.int64)
    columns[:, :most] = drafts.columns
    columns[every, count] = drawn(source, uniforms(params.seeds, positions + count, FINAL))
    return Verified(columns, count + 1)
