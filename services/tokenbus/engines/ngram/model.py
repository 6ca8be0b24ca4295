"""The model: the probabilities of tokens after contexts of a text, as tables in which a step looks things up."""

import io
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus.engines.ngram.tokenizer import COMMITTED, default_tokenizer
from tokenbus.engines.sampling import Ids

Logprobs = npt.NDArray[np.float32]

ABSENT = -1
"""In the place of a token, a context or a parent: there is none."""
WIDTH = 32
DRAFT_LENGTH = 2
"""At how many tokens the draft looks."""


class Tables(NamedTuple):
    """What a model has learned."""

    ids: Ids
    """Of contexts, a line each: the tokens that can follow, the likeliest first, ties by the lower id."""
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


class Model:
    """Every context by number, each with a line of tokens that can follow. A text is in the longest one it ends in.

    A token's column is its place in a context's line. A last column, without probability, is that of all others.
    The draft is the same model with contexts cut to their last tokens. Nothing here changes.
    """

    def __init__(self, tables: Tables, vocabulary_size: int) -> None:
        self._tables = tables
        self.vocabulary_size = vocabulary_size
        self.parents = tables.parents
        self.count = count = tables.parents.size
        self.ids = tables.ids.astype(np.int32)
        self.logits = np.hstack([tables.logprobs, np.full((count, 1), -np.inf, np.float32)])
        self.chances = np.exp(self.logits - self.logits[:, :1], dtype=float)
        """What `distribution` makes of the logits with no temperature and no cut."""
        self.chances /= self.chances.sum(axis=1, keepdims=True)
        self.ranks = _ranks(tables.logprobs)
        self.drafts = self._shortened(DRAFT_LENGTH)
        """Of contexts: the draft's."""
        longer = (self.drafts != np.arange(count)).nonzero()[0]  # the others are their own drafts
        drafted = tables.ids[self.drafts]
        self.columns_in_draft = np.tile(np.arange(WIDTH + 1), (count, 1))
        """Of contexts: for each of its columns, the draft's."""
        self.columns_in_draft[longer, :WIDTH] = self._columns(self.drafts[longer], tables.ids[longer])
        self.draft_columns = np.tile(np.arange(WIDTH), (count, 1))
        """Of contexts: for each token of its draft's line, its column here."""
        self.draft_columns[longer] = self._columns(longer, drafted[longer])
        self.next = self.after(np.repeat(np.arange(count), WIDTH), tables.ids.ravel()).reshape(-1, WIDTH)
        """Of contexts: that after each token of its line."""
        self.draft_next = np.take_along_axis(self.next, np.minimum(self.draft_columns, WIDTH - 1), axis=1)
        """Of contexts: that after each token of its draft's line."""
        absent = (self.draft_columns == WIDTH).nonzero()
        self.draft_next[absent] = self.after(absent[0], drafted[absent])

    def after(self, contexts: Ids, tokens: Ids) -> Ids:
        """Return the context that each is in after one more token."""
        # The token alone is always one; what is longer is sought from the longest down.
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
        """Return the context that a text is in; only its last tokens matter."""
        near = np.array(tokens[-self._tables.ends.size :], np.int64)
        context = near[:1]
        for token in near[1:]:
            context = self.after(context, token[None])
        return int(context[0])

    def _shortened(self, length: int) -> Ids:
        """Return for each context the longest of at most so many tokens that it ends in."""
        contexts = np.arange(self.count)
        while (longer := contexts >= self._tables.ends[length - 1]).any():
            contexts[longer] = self.parents[contexts[longer]]
        return contexts

    def _columns(self, contexts: Ids, lines: Ids) -> Ids:
        """Return the column that each token of some lines has in the line's context."""
        by_id = np.argsort(self.ids, axis=1)
        ids = np.take_along_axis(self.ids, by_id, 1)
        known = (np.arange(self.count)[:, None] * self.vocabulary_size + ids).ravel()
        keys = contexts[:, None] * self.vocabulary_size + lines
        near = np.minimum(np.searchsorted(known, keys), known.size - 1)
        return np.where(known[near] == keys, by_id.ravel()[near], WIDTH)


def _ranks(logprobs: Logprobs) -> npt.NDArray[np.uint32]:
    """Return for each place of a line how many logprobs are larger, and one."""
    places = np.broadcast_to(np.arange(1, logprobs.shape[1] + 1), logprobs.shape)
    is_less = np.concatenate([np.ones((len(logprobs), 1), np.bool_), logprobs[:, 1:] < logprobs[:, :-1]], 1)
    return np.asarray(np.maximum.accumulate(np.where(is_less, places, 0), axis=1)).astype(np.uint32)


@cache
def default_model() -> Model:
    """Return the model that comes with this package."""
    data = COMMITTED.read_bytes()
    with np.load(io.BytesIO(data)) as file:
        tables = Tables(*(file[name] for name in Tables._fields))
    tables = tables._replace(ids=tables.ids.astype(np.int64), parents=tables.parents.astype(np.int64))
    return Model(tables, default_tokenizer().vocabulary_size)
