"""Mixing: what each context makes likely, from what followed it and what its shorter one makes likely."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_engines.ngram.counting import NOBODY, Counts, Ids, Level

DISCOUNT = 0.4
"""What is taken from each count for what was never seen there."""
FLOOR = 0.0005
"""The share of the probability that every token has alike."""

Floats = npt.NDArray[np.float64]
Logprobs = npt.NDArray[np.float32]


class Mixed(NamedTuple):
    """Of contexts, a line each: the likeliest tokens, the first first, ties by the lower id.

    Every token that is not in a context's line has the same logprob there, which is below those of the line.
    """

    ids: Ids
    logprobs: Logprobs


def tail_logprob(vocabulary_size: int) -> np.float32:
    """Return the logprob of a token that is not among the likeliest of a context."""
    return np.float32(np.log(FLOOR / vocabulary_size))


def mixed(counts: Counts, width: int) -> Mixed:
    """Return the likeliest tokens of every context, so many of each.

    What followed a context has a discounted share, and the rest is shared out as its parent's line says (Chen and
    Goodman's absolute discounting). A line is cut to its width and made to sum to one again before its children take
    from it, so the model of a lower order is part of that of a higher one.
    """
    order = np.lexsort((np.arange(counts.vocabulary_size), -counts.single))[:width]
    ids = order[None, :]
    masses = _to_one(counts.single[order].astype(np.float64)[None, :])
    all_ids, all_masses = [], []
    before = 0
    for level in counts.levels:
        parents = np.zeros(level.parents.size, np.int64) if level.first == 0 else level.parents - before
        ids, masses = _with_own(level, ids[parents], masses[parents], width)
        all_ids.append(ids)
        all_masses.append(masses)
        before = level.first
    return _as_logprobs(np.concatenate(all_ids), np.concatenate(all_masses), counts.vocabulary_size)


def _with_own(level: Level, ids: Ids, masses: Floats, width: int) -> tuple[Ids, Floats]:
    """Add what followed the contexts themselves to what their parents make likely."""
    totals = np.maximum(level.totals, 1).astype(np.float64)
    left = np.where(level.totals > 0, DISCOUNT * level.kinds / totals, 1.0)
    masses = masses * left[:, None]
    own = np.where(level.next_ids == NOBODY, 0.0, (level.next_counts - DISCOUNT) / totals[:, None])
    same = level.next_ids[:, :, None] == ids[:, None, :]
    masses = masses + (own[:, :, None] * same).sum(1)
    # A continuation that the parent has too is counted there, and is no candidate of its own.
    alone = np.where(same.any(2) | (level.next_ids == NOBODY), -1.0, own)
    ids, masses = np.concatenate([ids, level.next_ids], 1), np.concatenate([masses, alone], 1)
    order = np.lexsort((ids, -masses), axis=1)[:, :width]
    return np.take_along_axis(ids, order, 1), _to_one(np.take_along_axis(masses, order, 1))


def _to_one(masses: Floats) -> Floats:
    return np.asarray(masses / masses.sum(1, keepdims=True))


def _as_logprobs(ids: Ids, masses: Floats, vocabulary_size: int) -> Mixed:
    logprobs = np.log((1 - FLOOR) * masses + FLOOR / vocabulary_size).astype(np.float32)
    # Two that were not equal may be so as float32, and then the lower id comes first.
    order = np.lexsort((ids, -logprobs), axis=1)
    ids, logprobs = np.take_along_axis(ids, order, 1), np.take_along_axis(logprobs, order, 1)
    if not (logprobs[:, -1] > tail_logprob(vocabulary_size)).all():
        raise ValueError("a token of a line is as unlikely as those of none: the floor is too high")
    return Mixed(ids, logprobs)
