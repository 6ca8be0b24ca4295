"""Sampling and speculation that engines share: random numbers, distributions, and the acceptance of drafts.

A random number follows from a request's seed, a token's position and its purpose alone. So neighbours, preemption and
chunks of prompts change nothing of a request's output.

Distributions are over columns. A column is a token; or, where an engine gives `sizes`, as many tokens as the column's
size, all equally probable. Columns with sizes come in the order of probability, the most probable first.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]

DRAFT, ACCEPT, FINAL = 1, 2, 3
"""The purposes of random numbers."""
_PURPOSES = np.uint64(4)
_ADDED = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_UNUSED_BITS = np.uint64(11)
_TINY = float(np.finfo(np.float64).tiny)


def mixed(words: Words) -> Words:
    """Return splitmix64 of each word."""
    words = words + _ADDED
    words ^= words >> _SHIFTS[0]
    words *= _FACTORS[0]
    words ^= words >> _SHIFTS[1]
    words *= _FACTORS[1]
    words ^= words >> _SHIFTS[2]
    return words


def uniforms(seeds: Words, positions: Ids, purpose: int) -> Floats:
    """Return a number from 0 to below 1 for each seed and position in the output.

    Purposes differ in their low two bits; each has numbers of its own at every position.
    """
    counters = positions.astype(np.uint64)
    counters *= _PURPOSES
    counters += np.uint64(purpose)
    words = mixed(seeds ^ mixed(counters))
    words >>= _UNUSED_BITS
    return np.asarray(words * 2.0**-53, np.float64)


class SamplingParams(NamedTuple):
    """How the requests of some rows want their tokens to be chosen."""

    temperatures: Floats
    """0: the most probable token."""
    top_ks: Ids
    """0: all tokens."""
    top_ps: Floats
    seeds: Words
    salt: int = 0
    """The engine adds this to each purpose."""

    @classmethod
    def plain(cls, rows: int) -> "SamplingParams":
        """Return the parameters of rows that want the model's own probabilities."""
        return cls(np.ones(rows), np.zeros(rows, np.int64), np.ones(rows), np.zeros(rows, np.uint64))

    @property
    def are_plain(self) -> bool:
        """Whether all tokens are drawn with the model's own probabilities."""
        return not (self.top_ks.any() or (self.top_ps < 1).any() or (self.temperatures != 1).any())

    def of(self, rows: npt.NDArray[np.integer] | npt.NDArray[np.bool_]) -> "SamplingParams":
        """Return the parameters of some of the rows."""
        cut = (self.temperatures[rows], self.top_ks[rows], self.top_ps[rows], self.seeds[rows])
        return SamplingParams(*cut, self.salt)

    def uniforms(self, positions: Ids, purpose: int) -> Floats:
        """Return a random number for each row's positions, [rows] or [rows, positions]."""
        seeds = self.seeds.reshape(-1, *(1,) * (positions.ndim - 1))
        return uniforms(seeds, positions, purpose + self.salt)


class Distribution(NamedTuple):
    """What tokens are drawn from, for each line: [rows, ..., columns]."""

    chances: Floats
    """The probability of each column."""
    kept: Floats
    """How many tokens of each column can be drawn."""


class Verified(NamedTuple):
    """The tokens that each row got in a step: the drafts that the target accepted, and one more."""

    columns: Ids
    """[rows, drafts + 1], from the left."""
    counts: Ids
    """How many of a row's columns are meant."""
    within: Ids
    """Which token of its column the last one is."""


def distribution(logits: Logits, params: SamplingParams, sizes: Floats | None = None) -> Distribution:
    """Return what temperature, then top-k, then top-p make of logits [rows, ..., columns]; ties by lower column."""
    extra = (1,) * (logits.ndim - 1)
    temperatures = params.temperatures.reshape(-1, *extra)
    has_greedy = not temperatures.all()
    if has_greedy:
        best = np.arange(logits.shape[-1]) == logits.argmax(axis=-1)[..., None]
        if not temperatures.any():
            return Distribution(best.astype(float), best.astype(float))
    weights = np.subtract(logits, logits.max(axis=-1, keepdims=True) if sizes is None else logits[..., :1], dtype=float)
    if (temperatures != 1).any():
        weights /= np.where(temperatures == 0, 1.0, temperatures) if has_greedy else temperatures
    np.exp(weights, out=weights)
    kept = np.ones(weights.shape[-1]) if sizes is None else sizes
    if params.top_ks.any() or (params.top_ps < 1).any():
        limits = np.where(params.top_ks == 0, kept.sum(), params.top_ks).reshape(-1, *extra)
        order = np.argsort(-weights, axis=-1, kind="stable") if sizes is None else None
        ranked = weights if order is None else np.take_along_axis(weights, order, axis=-1)
        kept = _truncated(ranked, kept, limits, params.top_ps.reshape(-1, *extra))
        if order is not None:
            ranked = np.zeros_like(weights)
            np.put_along_axis(ranked, order, kept, axis=-1)
            kept = ranked
    if has_greedy:
        kept = np.where(temperatures == 0, best, kept)
    weights *= kept
    weights /= weights.sum(axis=-1, keepdims=True)
    return Distribution(weights, np.broadcast_to(kept, weights.shape))


def _truncated(ranked: Floats, sizes: Floats, top_ks: Ids, top_ps: Floats) -> Floats:
    """Return how many tokens of each column top-k leaves, and then top-p of the rest; the likeliest columns first."""
    kept = np.clip(top_ks - (np.cumsum(sizes) - sizes), 0, sizes)
    masses = ranked * kept
    before = masses.cumsum(axis=-1) - masses
    missing = np.maximum(top_ps * masses.sum(axis=-1, keepdims=True) - before, 0.0)
    return np.where(top_ps < 1, np.minimum(np.ceil(missing / np.maximum(ranked, _TINY)), kept), kept)


def drawn(chances: Floats, numbers: Floats) -> Ids:
    """Return the column that each line's random number leads to; never one without probability."""
    sums = chances.cumsum(axis=-1)
    wanted = np.minimum(numbers * sums[..., -1], np.nextafter(sums[..., -1], 0))
    return np.asarray((sums > wanted[..., None]).argmax(axis=-1), np.int64)


def accepted(target: Floats, offered: Floats, numbers: Floats, counts: Ids) -> Ids:
    """Return how many drafts of each row are accepted: those before the first that is rejected.

    A draft is accepted with probability min(1, target / offered), so that tokens come as if from the target alone. All
    are [rows, drafts]: the probabilities that the target and the draft model give to each draft, and a random number.
    """
    is_rejected = np.ones((numbers.shape[0], numbers.shape[1] + 1), np.bool_)
    np.greater_equal(numbers * offered, target, out=is_rejected[:, :-1])
    is_rejected[:, :-1] |= np.arange(numbers.shape[1]) >= counts[:, None]
    return np.asarray(np.argmax(is_rejected, axis=1), np.int64)


class Drafts(NamedTuple):
    """The tokens that were proposed to follow, for each row from the left."""

    columns: Ids
    """[rows, drafts]; a draft in a column of several tokens is never accepted."""
    chances: Floats
    """Their distributions, less what is in columns of several tokens: [rows, drafts, columns]."""
    counts: Ids


def verified(
    target: Distribution, drafts: Drafts, params: SamplingParams, positions: Ids, sizes: Floats | None = None
) -> Verified:
    """Return the tokens of each row, whose first has the given position, by rejection sampling (Leviathan, Chen).

    `target` is of [rows, drafts + 1, columns]. After the first draft that is rejected, a token is drawn
    from what the target has more of than the draft; after the last draft, one from the target. So each token comes with
    the target's own probability.
    """
    rows, most = drafts.columns.shape
    every, place = np.arange(rows), np.arange(most)
    wanted = target.chances[every[:, None], place, drafts.columns]
    if sizes is not None:
        wanted = np.where(sizes[drafts.columns] > 1, 0.0, wanted)
    offered = drafts.chances[every[:, None], place, drafts.columns]
    numbers = params.uniforms(positions[:, None] + place, ACCEPT)
    count = accepted(wanted, offered, numbers, drafts.counts)
    source = target.chances[every, count]
    rejected = np.flatnonzero(count < drafts.counts)
    if rejected.size:
        rest = np.maximum(source[rejected] - drafts.chances[rejected, count[rejected]], 0)
        # Only rounding leaves nothing over: then the two distributions are the same.
        source[rejected] = np.where(rest.sum(axis=-1, keepdims=True) > 0, rest, source[rejected])
    columns = np.zeros((rows, most + 1), np.int64)
    columns[:, :most] = drafts.columns
    numbers = params.uniforms(positions + count, FINAL)
    columns[every, count] = last = drawn(source, numbers)
    within = np.zeros(rows, np.int64)
    kept = target.kept[every, count, last]
    several = np.flatnonzero(kept > 1)
    if several.size:
        sums = source[several].cumsum(axis=-1)
        at, masses = last[several], source[several, last[several]]
        beyond = numbers[several] * sums[:, -1] - (sums[np.arange(several.size), at] - masses)
        within[several] = np.clip(beyond / masses * kept[several], 0, kept[several] - 1)
    return Verified(columns, count + 1, within)
