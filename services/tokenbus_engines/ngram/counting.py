"""Counting: which contexts the taught text has, and what came after each, how often."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

NOBODY = -1
"""In the place of a token, a context or a parent: none."""


class Level(NamedTuple):
    """The contexts of one length, which are numbered on from those of the level before."""

    first: int
    """The number of the first one."""
    parents: Ids
    """Of contexts: the one without the oldest token."""
    prefixes: Ids
    """Of contexts: the one without the newest token; nobody for those of one token."""
    newest: Ids
    """Of contexts: the newest token."""
    totals: Ids
    """Of contexts: how often something came after it."""
    kinds: Ids
    """Of contexts: how many different tokens did."""
    next_ids: Ids
    """Of contexts, a line each: the most frequent of those, ties by the lower id, then nobody."""
    next_counts: Ids
    """Of contexts, a line each: how often each of them came."""


class Counts(NamedTuple):
    """What was counted in a text."""

    vocabulary_size: int
    single: Ids
    """Of tokens: how often each occurs."""
    levels: list[Level]
    """By length, from one token up. Every token is a context of one, whether it occurs or not."""


def counted(texts: Sequence[Sequence[int]], end_token: int, continuations: Sequence[int]) -> Counts:
    """Count contexts of one token, two tokens and so on, and what most often follows each: as many as are asked for.

    Each text begins and ends with the end token, and no context reaches back over one.
    """
    tokens = np.array([end_token, *(token for text in texts for token in (*text, end_token))], np.int64)
    size = end_token + 1
    single = np.bincount(tokens[1:], minlength=size)
    contexts = tokens  # of places in the text: the context of the current length that ends there
    levels = [_level(0, contexts, tokens, _alone(size), continuations[0])]
    first = size
    for most in continuations[1:]:
        before = np.concatenate([[NOBODY], contexts[:-1]])
        keys = np.where((before == NOBODY) | (tokens == end_token), NOBODY, before * size + tokens)
        found, places, numbers = np.unique(keys, return_index=True, return_inverse=True)
        has_nobody = int(found[0] == NOBODY)
        places = places[has_nobody:]
        ancestry = _Ancestry(contexts[places], before[places], tokens[places])
        contexts = np.where(keys == NOBODY, NOBODY, numbers - has_nobody + first)
        levels.append(_level(first, contexts, tokens, ancestry, most))
        first += places.size
    return Counts(size, single, levels)


class _Ancestry(NamedTuple):
    parents: Ids
    prefixes: Ids
    newest: Ids


def _alone(size: int) -> _Ancestry:
    nobody = np.full(size, NOBODY, np.int64)
    return _Ancestry(nobody, nobody, np.arange(size))


def _level(first: int, contexts: Ids, tokens: Ids, ancestry: _Ancestry, continuations: int) -> Level:
    """Count what comes after each context."""
    rows = ancestry.newest.size
    size = int(tokens.max()) + 1
    at, then = contexts[:-1], tokens[1:]
    keys, counts = np.unique(((at - first) * size + then)[at != NOBODY], return_counts=True)
    owners, followers = np.divmod(keys, size)
    order = np.lexsort((followers, -counts, owners))
    owners, followers, counts = owners[order], followers[order], counts[order]
    kinds = np.bincount(owners, minlength=rows)
    totals = np.bincount(owners, counts, minlength=rows).astype(np.int64)
    places = np.arange(owners.size) - np.repeat(np.cumsum(kinds) - kinds, kinds)
    near = places < continuations
    next_ids = np.full((rows, continuations), NOBODY, np.int64)
    next_counts = np.zeros((rows, continuations), np.int64)
    next_ids[owners[near], places[near]] = followers[near]
    next_counts[owners[near], places[near]] = counts[near]
    return Level(first, *ancestry, totals, kinds, next_ids, next_counts)
