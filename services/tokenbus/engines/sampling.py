"""Shared sampling code: random numbers, distributions, and verification of drafts.

A random number depends only on the request's seed, the token's position and the purpose. A request's output therefore
does not depend on its batch, on preemption or on prompt chunks. A column of a distribution is a token of the
vocabulary, or one of an engine's shortlist.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]

DRAFT, ACCEPT, FINAL = 1, 2, 3
"""The purposes of random numbers, in two bits."""
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
    """Return a number in [0, 1) for each position of each seed; positions are [rows] or [rows, positions]."""
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
    """0: greedy."""
    top_ks: Ids
    """0: all tokens."""
    top_ps: Floats
    seeds: Words

    @property
    def are_plain(self) -> bool:
        """Whether all tokens are sampled with the model's unchanged probabilities."""
        return not (self.top_ks.any() or (self.top_ps < 1).any() or (self.temperatures != 1).any())


def distribution(logits: Logits, params: SamplingParams, *, are_sorted: bool = False) -> Floats:
    """Apply temperature, top-k and top-p to logits [rows, ..., columns] and return probabilities; ties by lower column.

    `are_sorted`: the columns are sorted by probability.
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
    """Sample a column of each row with its random number; never a column of probability 0."""
    sums = chances.cumsum(axis=-1)
    wanted = np.minimum(numbers * sums[..., -1], np.nextafter(sums[..., -1], 0))
    return np.asarray((sums > wanted[..., None]).argmax(axis=-1), np.int64)


class Drafts(NamedTuple):
    """The draft tokens of each row, from the left."""

    columns: Ids
    """[rows, drafts]"""
    chances: Floats
    """The distributions from which they were sampled: [rows, drafts, columns]."""
    counts: Ids


class Verified(NamedTuple):
    """The tokens of each row: the accepted drafts, and one more."""

    columns: Ids
    """[rows, drafts + 1], from the left."""
    counts: Ids
    """The number of tokens of each row."""


def verified(target: Floats, drafts: Drafts, params: SamplingParams, positions: Ids) -> Verified:
    """Verify drafts by rejection sampling (Leviathan, Chen); `positions` are those of the first tokens.

    `target` has the distributions [rows, drafts + 1, columns]. A draft is accepted with probability min(1, target /
    draft). After the first rejected draft a token is sampled from the normalized max(0, target - draft); after the last
    accepted draft, from the target. Each token thus has the target's probability.
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
        # The remainder is empty only because of rounding; then the two distributions are the same.
        source[rejected] = np.where(rest.sum(axis=-1, keepdims=True) > 0, rest, source[rejected])
    columns = np.zeros((rows, most + 1), np.int64)
    columns[:, :most] = drafts.columns
    columns[every, count] = drawn(source, uniforms(params.seeds, positions + count, FINAL))
    return Verified(columns, count + 1)
