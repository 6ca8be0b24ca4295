"""Model: lookup tables of the probabilities of tokens after contexts."""

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus.engines.ngram.tokenizer import COMMITTED, default_tokenizer
from tokenbus.engines.sampling import Ids

Logprobs = npt.NDArray[np.float32]

ABSENT = -1
"""Marker of a missing token, context or parent."""
WIDTH = 32
DRAFT_LENGTH = 2
"""Context length of the draft model, in tokens."""


class Tables(NamedTuple):
    """Tables of the trained model."""

    ids: Ids
    """Tokens that can follow each context, of shape [contexts, WIDTH], sorted by probability and then by id."""
    logprobs: Logprobs
    """Logprobs of the tokens in `ids`."""
    parents: Ids
    """Each context without its oldest token, or ABSENT for a context of one token."""
    keys: Ids
    """The sorted keys of all contexts with two or more tokens, followed by a sentinel.

    A key is `number of the context without its newest token * vocabulary size + newest token`.
    """
    numbers: Ids
    """Context number of each key."""
    ends: Ids
    """For each context length, beginning with 1, the context number after the last context of this length."""


class Model:
    """An immutable n-gram model. The context of a text is its longest known suffix.

    A token's column is its index in a context's row. The last column has probability 0 and stands for all other tokens.
    The draft model is the same model with shortened contexts.
    """

    def __init__(self, tables: Tables, vocabulary_size: int) -> None:
        self._tables = tables
        self.vocabulary_size = vocabulary_size
        self.parents = tables.parents
        self.count = count = tables.parents.size
        self.ids = tables.ids.astype(np.int32)
        self.logits = np.hstack([tables.logprobs, np.full((count, 1), -np.inf, np.float32)])
        self.chances = np.exp(self.logits - self.logits[:, :1], dtype=float)
        """Probabilities of the columns at temperature 1."""
        self.chances /= self.chances.sum(axis=1, keepdims=True)
        self.ranks = _ranks(tables.logprobs)
        self.drafts = self._shortened(DRAFT_LENGTH)
        """Context of the draft model for each context of the full model."""
        longer = (self.drafts != np.arange(count)).nonzero()[0]  # shorter contexts stay unchanged in the draft model
        drafted = tables.ids[self.drafts]
        self.columns_in_draft = np.tile(np.arange(WIDTH + 1), (count, 1))
        """For a token at [context, column], the token's column in the draft model's context."""
        self.columns_in_draft[longer, :WIDTH] = self.columns(self.drafts[longer], tables.ids[longer])
        self.draft_columns = np.tile(np.arange(WIDTH), (count, 1))
        """For a token at [context, draft column], the token's column in the full context."""
        self.draft_columns[longer] = self.columns(longer, drafted[longer])
        self.next = self.after(np.repeat(np.arange(count), WIDTH), tables.ids.ravel()).reshape(-1, WIDTH)
        """For a token at [context, column], the context after the token."""
        self.draft_next = np.take_along_axis(self.next, np.minimum(self.draft_columns, WIDTH - 1), axis=1)
        """For a token at [context, draft column], the context after the token."""
        absent = (self.draft_columns == WIDTH).nonzero()
        self.draft_next[absent] = self.after(absent[0], drafted[absent])

    def after(self, contexts: Ids, tokens: Ids) -> Ids:
        """Return the contexts that result from appending one token to each context."""
        # The longest context is tried first. A single token is always a context.
        found = tokens.astype(np.int64)
        open_ = np.arange(found.size)
        at = contexts.astype(np.int64)
        while open_.size:
            keys = at * self.vocabulary_size + tokens[open_]
            places = np.searchsorted(self._tables.keys, keys)
            hit = self._tables.keys[places] == keys
            found[open_[hit]] = self._tables.numbers[places[hit]]
            at = self.parents[at]
            rest = ~hit & (at != ABSENT)
            open_, at = open_[rest], at[rest]
        return found

    def context_of(self, tokens: list[int]) -> int:
        near = np.array(tokens[-self._tables.ends.size :], np.int64)
        context = near[:1]
        for token in near[1:]:
            context = self.after(context, token[None])
        return int(context[0])

    def _shortened(self, length: int) -> Ids:
        """Return each context, shortened to at most `length` tokens."""
        contexts = np.arange(self.count)
        while (longer := contexts >= self._tables.ends[length - 1]).any():
            contexts[longer] = self.parents[contexts[longer]]
        return contexts

    def columns(self, contexts: Ids, tokens: Ids) -> Ids:
        """Return each token's column in its context. Tokens have shape [contexts, tokens]."""
        found = self.ids[contexts][:, None, :] == tokens[:, :, None]
        return np.where(found.any(2), found.argmax(2), WIDTH)


def _ranks(logprobs: Logprobs) -> npt.NDArray[np.uint32]:
    """Return the rank of each column: 1 plus the number of larger logprobs."""
    places = np.broadcast_to(np.arange(1, logprobs.shape[1] + 1), logprobs.shape)
    is_less = np.concatenate([np.ones((len(logprobs), 1), np.bool_), logprobs[:, 1:] < logprobs[:, :-1]], 1)
    return np.asarray(np.maximum.accumulate(np.where(is_less, places, 0), axis=1)).astype(np.uint32)


@cache
def default_model() -> Model:
    with np.load(COMMITTED) as file:
        tables = Tables(*(file[name] for name in Tables._fields))
    tables = tables._replace(ids=tables.ids.astype(np.int64), parents=tables.parents.astype(np.int64))
    return Model(tables, default_tokenizer().vocabulary_size)
