"""The model: the probabilities of tokens after contexts of a text, as tables in which a step looks things up."""

import hashlib
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_engines.ngram.tokenizer import COMMITTED, Tokenizer, default_tokenizer
from tokenbus_engines.sampling import Ids, SamplingParams, distribution

Logprobs = npt.NDArray[np.float32]

ABSENT = -1
"""In the place of a token, a context or a parent: there is none."""
FLOOR = 0.0005
"""The share of the probability that all tokens have alike."""
WIDTH = 32
"""How many tokens of a context have a probability of their own."""
DRAFT_LENGTH = 2
"""At how many tokens the draft looks."""


class Tables(NamedTuple):
    """What a model has learned."""

    ids: Ids
    """Of contexts, a line each: the likeliest tokens, the first first, ties by the lower id.

    Every token that is not in a context's line has the same logprob there, which is below those of the line.
    """
    logprobs: Logprobs
    """Of contexts, a line each: the logprobs of those."""
    parents: Ids
    """Of contexts: the one without the oldest token; absent for those of one token."""
    keys: Ids
    """Of contexts of more tokens than one, and one that is none: the prefix's number and the newest token, in order."""
    numbers: Ids
    """Of those: the context's number."""
    ends: Ids
    """By length, from one token up: the number behind those of the contexts that are so long."""


class Contexts:
    """Every context of the model, by number. A text is in the longest one that it ends in."""

    def __init__(self, tables: Tables, vocabulary_size: int) -> None:
        self._size = vocabulary_size
        self._depth = tables.ends.size
        self._ends = tables.ends.tolist()
        self._keys, self._numbers = tables.keys, tables.numbers
        self.parents = tables.parents
        """Of contexts: the one without the oldest token; absent for those of one token."""
        self.count = self.parents.size

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


def tail_logprob(vocabulary_size: int) -> np.float32:
    """Return the logprob of a token that is not among the likeliest of a context."""
    return np.float32(np.log(FLOOR / vocabulary_size))


class Model:
    """Of each context a line with its likeliest tokens; all others are its tail, and have one logprob, by id.

    A token's place in a context says both: below the width, its place in the line, else behind it that in the tail.
    So a draft's token is looked up in the target's line without a search. The draft is the same model with contexts
    cut to their last tokens. Nothing here changes.
    """

    def __init__(self, tokenizer: Tokenizer, lines: Tables) -> None:
        self.vocabulary_size = tokenizer.vocabulary_size
        self.contexts = Contexts(lines, self.vocabulary_size)
        self.ids = lines.ids.astype(np.int32)
        """Of contexts: the tokens of its line."""
        everywhere = np.arange(self.contexts.count)
        tail = np.full((self.contexts.count, 1), tail_logprob(self.vocabulary_size))
        self.logits = np.hstack([lines.logprobs, tail])
        """The logprobs of a context's line, and the one that each token of its tail has."""
        self.sizes = np.array([1.0] * WIDTH + [self.vocabulary_size - WIDTH])
        """How many tokens each of these logprobs is for."""
        self.chances = distribution(self.logits, SamplingParams.plain(self.contexts.count), self.sizes).chances
        """The probabilities of the same, with no temperature and no cut; that of the tail is of all its tokens."""
        self.offered = self.chances.copy()
        """Those with which a draft proposes: none of its tail."""
        self.offered[:, WIDTH] = 0
        self.offered /= self.offered.sum(axis=1, keepdims=True)
        self.ranks = _ranks(self.logits)
        """The ranks of the same."""
        by_id = np.argsort(lines.ids, axis=1)
        self._order = by_id.astype(np.uint8)
        self._sorted_ids = np.take_along_axis(lines.ids, by_id, 1).astype(np.int32)
        self._keys = (everywhere[:, None] * self.vocabulary_size + self._sorted_ids).ravel()
        after = self.contexts.after(np.repeat(everywhere, WIDTH), lines.ids.ravel())
        self._next = after.astype(np.int32).reshape(-1, WIDTH)
        self.drafts = self.contexts.shortened(DRAFT_LENGTH)
        """Of contexts: the draft's."""
        in_draft = np.minimum(self._crossed(self.drafts, lines.ids), WIDTH)
        self.places_in_draft = np.hstack([in_draft, np.full_like(tail, WIDTH, np.int64)])
        """Of contexts: for each token of its line, its place in the draft's; the width, where it is in the tail."""
        self.draft_places = self._crossed(everywhere, lines.ids[self.drafts]).astype(np.int32)
        """Of contexts: for each token of its draft's line, its place here."""
        self.fingerprint = _fingerprint(tokenizer, self)

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
    places = np.broadcast_to(np.arange(1, logprobs.shape[1] + 1), logprobs.shape)
    is_less = np.concatenate([np.ones((len(logprobs), 1), np.bool_), logprobs[:, 1:] < logprobs[:, :-1]], 1)
    return np.asarray(np.maximum.accumulate(np.where(is_less, places, 0), axis=1)).astype(np.uint32)


def _fingerprint(tokenizer: Tokenizer, model: Model) -> str:
    digest = hashlib.sha256()
    for token_id in range(tokenizer.vocabulary_size):
        piece = tokenizer.token_bytes(token_id)
        digest.update(len(piece).to_bytes(4, "little") + piece)
    for array in (model.ids, model.logits[:, :WIDTH]):
        digest.update(array.tobytes())
    return digest.hexdigest()[:32]


@cache
def default_model() -> Model:
    """Return the model that comes with this package."""
    with np.load(COMMITTED) as file:
        tables = Tables(*(file[name] for name in Tables._fields))
    return Model(
        default_tokenizer(), tables._replace(ids=tables.ids.astype(np.int64), parents=tables.parents.astype(np.int64))
    )
