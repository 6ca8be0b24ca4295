"""The model: contexts counted in a text, mixed to probabilities, and kept as tables in which a step looks things up."""

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_engines.ngram.tokenizer import Tokenizer, default_tokenizer, documents

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Logprobs = npt.NDArray[np.float32]

ABSENT = -1
"""In the place of a token, a context or a parent: there is none."""
DISCOUNT = 0.4
"""What is taken from each count for what was never seen there."""
FLOOR = 0.0005
"""The share of the probability that all tokens have alike."""
WIDTH = 32
"""How many tokens of a context have a probability of their own."""
CONTINUATIONS = (WIDTH, 16, 8)
"""By a context's length, how many of the tokens that followed it are remembered; the target looks at three tokens."""
DRAFT_LENGTH = 2
"""At how many tokens the draft looks."""


class Level(NamedTuple):
    """The contexts of one length, which are numbered on from those of the level before."""

    first: int
    """The number of the first one."""
    parents: Ids
    """Of contexts: the one without the oldest token."""
    prefixes: Ids
    """Of contexts: the one without the newest token; absent for those of one token."""
    newest: Ids
    """Of contexts: the newest token."""
    totals: Ids
    """Of contexts: how often something came after it."""
    kinds: Ids
    """Of contexts: how many different tokens did."""
    next_ids: Ids
    """Of contexts, a line each: the most frequent of those, ties by the lower id, then absent."""
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
        before = np.concatenate([[ABSENT], contexts[:-1]])
        keys = np.where((before == ABSENT) | (tokens == end_token), ABSENT, before * size + tokens)
        found, places, numbers = np.unique(keys, return_index=True, return_inverse=True)
        has_absent = int(found[0] == ABSENT)
        places = places[has_absent:]
        ancestry = _Ancestry(contexts[places], before[places], tokens[places])
        contexts = np.where(keys == ABSENT, ABSENT, numbers - has_absent + first)
        levels.append(_level(first, contexts, tokens, ancestry, most))
        first += places.size
    return Counts(size, single, levels)


class _Ancestry(NamedTuple):
    parents: Ids
    prefixes: Ids
    newest: Ids


def _alone(size: int) -> _Ancestry:
    absent = np.full(size, ABSENT, np.int64)
    return _Ancestry(absent, absent, np.arange(size))


def _level(first: int, contexts: Ids, tokens: Ids, ancestry: _Ancestry, continuations: int) -> Level:
    """Count what comes after each context."""
    rows = ancestry.newest.size
    size = int(tokens.max()) + 1
    at, then = contexts[:-1], tokens[1:]
    keys, counts = np.unique(((at - first) * size + then)[at != ABSENT], return_counts=True)
    owners, followers = np.divmod(keys, size)
    order = np.lexsort((followers, -counts, owners))
    owners, followers, counts = owners[order], followers[order], counts[order]
    kinds = np.bincount(owners, minlength=rows)
    totals = np.bincount(owners, counts, minlength=rows).astype(np.int64)
    places = np.arange(owners.size) - np.repeat(np.cumsum(kinds) - kinds, kinds)
    near = places < continuations
    next_ids = np.full((rows, continuations), ABSENT, np.int64)
    next_counts = np.zeros((rows, continuations), np.int64)
    next_ids[owners[near], places[near]] = followers[near]
    next_counts[owners[near], places[near]] = counts[near]
    return Level(first, *ancestry, totals, kinds, next_ids, next_counts)


class Contexts:
    """Every context of the model, by number. A text is in the longest one that it ends in."""

    def __init__(self, counts: Counts) -> None:
        """Take what was counted."""
        self._size = counts.vocabulary_size
        self._depth = len(counts.levels)
        self.parents = np.concatenate([level.parents for level in counts.levels])
        """Of contexts: the one without the oldest token; absent for those of one token."""
        self.count = self.parents.size
        deeper = counts.levels[1:]
        keys = [level.prefixes * self._size + level.newest for level in deeper]
        numbers = [np.arange(level.first, level.first + level.newest.size) for level in deeper]
        # One more that is never searched for, so that a search always ends at something.
        joined = np.concatenate([*keys, [np.iinfo(np.int64).max]])
        order = np.argsort(joined)
        self._keys = joined[order]
        self._numbers = np.concatenate([*numbers, [ABSENT]])[order]
        self._ends = [level.first + level.newest.size for level in counts.levels]

    def after(self, contexts: Ids, tokens: Ids) -> Ids:
        """Return the context that each is in after one more token."""
        # The token alone is always one; what is longer is sought from the longest down.
        found = tokens.astype(np.int64)
        open_ = np.arange(found.size)
        at = contexts.astype(np.int64)
        while open_.size:
            keys = at * self._size + tokens[open_]
            places = np.searchsorted(self._keys, keys)
            hit = self._keys[places] == keys
            found[open_[hit]] = self._numbers[places[hit]]
            at = self.parents[at]
            rest = ~hit & (at != ABSENT)
            open_, at = open_[rest], at[rest]
        return found

    def of(self, tokens: list[int]) -> int:
        """Return the context that a text is in; only its last tokens matter."""
        near = np.array(tokens[-self._depth :], np.int64)
        context = near[:1]
        for token in near[1:]:
            context = self.after(context, token[None])
        return int(context[0])

    def shortened(self, length: int) -> Ids:
        """Return for each context the longest of at most so many tokens that it ends in."""
        contexts = np.arange(self.count)
        most = self._ends[length - 1]
        while (longer := contexts >= most).any():
            contexts[longer] = self.parents[contexts[longer]]
        return contexts


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
    own = np.where(level.next_ids == ABSENT, 0.0, (level.next_counts - DISCOUNT) / totals[:, None])
    same = level.next_ids[:, :, None] == ids[:, None, :]
    masses = masses + (own[:, :, None] * same).sum(1)
    # A continuation that the parent has too is counted there, and is no candidate of its own.
    alone = np.where(same.any(2) | (level.next_ids == ABSENT), -1.0, own)
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


class Model:
    """Of each context a line with its likeliest tokens; all others are its tail, and have one logprob, by id.

    A token's place in a context says both: below the width, its place in the line, else behind it that in the tail.
    So a draft's token is looked up in the target's line without a search. The draft is the same model with contexts
    cut to their last tokens. Nothing here changes.
    """

    def __init__(self, tokenizer: Tokenizer, texts: list[str]) -> None:
        """Learn some texts."""
        counts = counted([tokenizer.encode(text) for text in texts], tokenizer.end_token, CONTINUATIONS)
        lines = mixed(counts, WIDTH)
        self.vocabulary_size = counts.vocabulary_size
        self.tail_size = self.vocabulary_size - WIDTH
        self.contexts = Contexts(counts)
        self.ids = lines.ids.astype(np.int32)
        """Of contexts: the tokens of its line."""
        self.logprobs = lines.logprobs
        """Of contexts: the logprobs of those."""
        self.tail_logprob = tail_logprob(self.vocabulary_size)
        self.ranks = _ranks(self.logprobs)
        """Of contexts: the ranks of those; the whole tail has that which follows them."""
        self.tail_below = np.float64(self.tail_logprob) - self.logprobs[:, 0]
        """Of contexts: how far below its first one the logprob of a token of the tail is."""
        self.tail_mass = np.exp(self.tail_below)
        """Of contexts: the probability of such a token, as a multiple of the first one's."""
        everywhere = np.arange(self.contexts.count)
        self.cumulated = np.cumsum(np.exp(self.below(everywhere)), axis=1, dtype=np.float64)
        """Of contexts: the probabilities of its line added up, as multiples of the first one's."""
        self.total = self.cumulated[:, -1] + self.tail_size * self.tail_mass
        """Of contexts: the same of all tokens."""
        by_id = np.argsort(lines.ids, axis=1)
        self._order = by_id.astype(np.uint8)
        self._sorted_ids = np.take_along_axis(lines.ids, by_id, 1).astype(np.int32)
        self._keys = (everywhere[:, None] * self.vocabulary_size + self._sorted_ids).ravel()
        after = self.contexts.after(np.repeat(everywhere, WIDTH), lines.ids.ravel())
        self._next = after.astype(np.int32).reshape(-1, WIDTH)
        self.drafts = self.contexts.shortened(DRAFT_LENGTH)
        """Of contexts: the draft's."""
        self.places_in_draft = np.minimum(self._crossed(self.drafts, lines.ids), WIDTH).astype(np.uint8)
        """Of contexts: for each token of its line, its place in the draft's; the width, where it is in the tail."""
        self.draft_places = self._crossed(everywhere, lines.ids[self.drafts]).astype(np.int32)
        """Of contexts: for each token of its draft's line, its place here."""
        self.is_crossed = np.asarray((self.draft_places >= WIDTH).any(1))
        """Of contexts: whether the draft's line has tokens of the tail here."""
        self.fingerprint = _fingerprint(tokenizer, self)

    def below(self, contexts: Ids) -> Logprobs:
        """Return how far below its first one the logprob of each token of a context's line is."""
        logprobs = self.logprobs.take(contexts, 0)
        return np.asarray(logprobs - logprobs[:, :1])

    def places(self, contexts: Ids, tokens: Ids) -> Ids:
        """Return the place that each token has in a context."""
        keys = contexts * self.vocabulary_size + tokens
        at = np.searchsorted(self._keys, keys)
        smaller = at - contexts * WIDTH
        near = np.minimum(at, self._keys.size - 1)
        in_line = self._keys[near] == keys
        inside = self._order.ravel()[near]
        return np.where(in_line, inside, WIDTH + tokens - smaller)

    def tokens(self, contexts: Ids, places: Ids) -> Ids:
        """Return the token at each place."""
        found = self.ids[contexts, np.minimum(places, WIDTH - 1)].astype(np.int64)
        behind = (places >= WIDTH).nonzero()[0]
        if behind.size:
            ordinals = places[behind] - WIDTH
            gaps = self._sorted_ids[contexts[behind]] - np.arange(WIDTH)
            found[behind] = ordinals + (gaps <= ordinals[:, None]).sum(1)
        return found

    def after(self, contexts: Ids, places: Ids, tokens: Ids) -> Ids:
        """Return the context after each token, whose place is known."""
        found = self._next[contexts, np.minimum(places, WIDTH - 1)].astype(np.int64)
        behind = (places >= WIDTH).nonzero()[0]
        if behind.size:
            found[behind] = self.contexts.after(contexts[behind], tokens[behind])
        return found

    def _crossed(self, contexts: Ids, tokens: Ids) -> Ids:
        """Return the places of lines of tokens in a context for each line."""
        return self.places(np.repeat(contexts, WIDTH), tokens.ravel()).reshape(-1, WIDTH)


def _ranks(logprobs: Logprobs) -> npt.NDArray[np.uint32]:
    """Return for each place of a line how many logprobs are larger, and one."""
    places = np.broadcast_to(np.arange(1, WIDTH + 1), logprobs.shape)
    is_less = np.concatenate([np.ones((len(logprobs), 1), np.bool_), logprobs[:, 1:] < logprobs[:, :-1]], 1)
    return np.asarray(np.maximum.accumulate(np.where(is_less, places, 0), axis=1)).astype(np.uint32)


def _fingerprint(tokenizer: Tokenizer, model: Model) -> str:
    digest = hashlib.sha256()
    for token_id in range(tokenizer.vocabulary_size):
        piece = tokenizer.token_bytes(token_id)
        digest.update(len(piece).to_bytes(4, "little") + piece)
    for array in (model.ids, model.logprobs):
        digest.update(array.tobytes())
    return digest.hexdigest()[:32]


@cache
def default_model() -> Model:
    """Return the model of the text that comes with this package."""
    return Model(default_tokenizer(), documents())
