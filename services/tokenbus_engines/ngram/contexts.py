"""Contexts: which one a text ends in, and which one comes after it with each token."""

import numpy as np

from tokenbus_engines.ngram.counting import NOBODY, Counts, Ids


class Contexts:
    """Every context of the model, by number. A text is in the longest one that it ends in."""

    def __init__(self, counts: Counts) -> None:
        """Take what was counted."""
        self._size = counts.vocabulary_size
        self._depth = len(counts.levels)
        self.parents = np.concatenate([level.parents for level in counts.levels])
        """Of contexts: the one without the oldest token; nobody for those of one token."""
        self.count = self.parents.size
        deeper = counts.levels[1:]
        keys = [level.prefixes * self._size + level.newest for level in deeper]
        numbers = [np.arange(level.first, level.first + level.newest.size) for level in deeper]
        # One more that nobody looks for, so that a search always ends at something.
        joined = np.concatenate([*keys, [np.iinfo(np.int64).max]])
        order = np.argsort(joined)
        self._keys = joined[order]
        self._numbers = np.concatenate([*numbers, [NOBODY]])[order]
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
            rest = ~hit & (at != NOBODY)
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
