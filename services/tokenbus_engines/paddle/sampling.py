"""Sampling: which token comes of logits, as each row's request wants it, and of chance that its seed fixes.

Chance is a function of seed, position and purpose: what a row gets does not depend on its neighbours, on when it is
computed, or on how often.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_engines.rng import mixed

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_UNIT = 2.0**-53


class Purpose(IntEnum):
    """What a random number decides; each has numbers of its own at every position."""

    DRAFT = 1
    ACCEPT = 2
    CHOOSE = 3


class Wishes(NamedTuple):
    """Of rows: how their requests want tokens to be chosen."""

    temperatures: Floats
    """0: the most probable token."""
    top_ks: Ids
    """0: all tokens."""
    top_ps: Floats
    seeds: npt.NDArray[np.uint64]

    def of(self, rows: npt.NDArray[np.integer] | npt.NDArray[np.bool_]) -> "Wishes":
        """Return those of some rows."""
        return Wishes(self.temperatures[rows], self.top_ks[rows], self.top_ps[rows], self.seeds[rows])


def uniforms(seeds: npt.NDArray[np.uint64], positions: Ids, purpose: Purpose) -> Floats:
    """Return a number from 0 to below 1 for each seed and position."""
    words = mixed(seeds ^ mixed(positions.astype(np.uint64) * np.uint64(4) + np.uint64(purpose)))
    return (words >> np.uint64(11)).astype(np.float64) * _UNIT


def probabilities(logits: npt.NDArray[np.float32], wishes: Wishes) -> Floats:
    """Return the distribution that each line of [rows, ..., vocabulary] is drawn from."""
    extra = (1,) * (logits.ndim - 1)
    temperatures = wishes.temperatures.reshape(-1, *extra)
    greedy = temperatures == 0
    scaled = logits.astype(np.float64)
    scaled = (scaled - scaled.max(axis=-1, keepdims=True)) / np.where(greedy, 1.0, temperatures)
    weights = np.exp(scaled)
    weights = _truncated(weights, wishes.top_ks.reshape(-1, *extra), wishes.top_ps.reshape(-1, *extra))
    if greedy.any():
        best = np.arange(logits.shape[-1]) == logits.argmax(axis=-1)[..., None]
        weights = np.where(greedy, best, weights)
    found: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return found


def drawn(distribution: Floats, chances: Floats) -> Ids:
    """Return the token that each line's chance leads to; none that is impossible."""
    sums = distribution.cumsum(axis=-1)
    below = (sums <= (chances * sums[..., -1])[..., None]).sum(axis=-1)
    last = distribution.shape[-1] - 1 - (distribution[..., ::-1] > 0).argmax(axis=-1)
    found: Ids = np.minimum(below, last).astype(np.int64)
    return found


def _truncated(weights: Floats, top_ks: Ids, top_ps: Floats) -> Floats:
    """Return the weights without those that top-k, and then top-p of what is left, exclude; ties by the lower id."""
    limits = np.where(top_ks == 0, weights.shape[-1], top_ks)
    if (limits >= weights.shape[-1]).all() and (top_ps >= 1).all():
        return weights
    order = np.argsort(-weights, axis=-1, kind="stable")
    ranked = np.take_along_axis(weights, order, axis=-1)
    ranked = np.where(np.arange(weights.shape[-1]) < limits, ranked, 0)
    before = ranked.cumsum(axis=-1) - ranked
    kept = before < top_ps * ranked.sum(axis=-1, keepdims=True)
    result = np.zeros_like(weights)
    np.put_along_axis(result, order, np.where(kept, ranked, 0), axis=-1)
    return result
