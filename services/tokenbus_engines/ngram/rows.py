"""Rows: what the engine knows of each request, in arrays with a slot for each."""

import numpy as np

from tokenbus_engines.ngram.admission import Asked, padded
from tokenbus_engines.ngram.counting import Ids
from tokenbus_engines.ngram.sampling import Knobs
from tokenbus_engines.ngram.speculation import Going
from tokenbus_engines.ngram.stopping import Stopping
from tokenbus_engines.rng import mixed

_FIRST_SLOTS = 64


class Rows:
    """The requests that have not ended. A slot is used again; its serial number is not."""

    def __init__(self, proposals: int) -> None:
        """Keep at most so many proposals of each."""
        self._by_key: dict[int, int] = {}
        self._free: list[int] = []
        self._count = 0
        self.stoppings: dict[int, Stopping] = {}
        """By slot, of the requests that have stops of their own."""
        self.keys = np.zeros(0, np.uint64)
        self.serials = np.zeros(0, np.int64)
        """In the order of admission."""
        self.seeds = np.zeros(0, np.uint64)
        self.mixed_seeds = np.zeros(0, np.uint64)
        self.contexts = np.zeros(0, np.int64)
        """Of the model, where each is."""
        self.positions = np.zeros(0, np.int64)
        """How many tokens each was given."""
        self.prompts = np.zeros(0, np.int64)
        """How many tokens its prompt has."""
        self.missing = np.zeros(0, np.int64)
        """How many of its tokens are to be computed before the next one can be."""
        self.ends = np.zeros(0, np.int64)
        """How many tokens it is given at most."""
        self.coldness = np.zeros(0)
        self.top_k = np.zeros(0, np.int64)
        self.top_p = np.zeros(0)
        self.top_logprobs = np.zeros(0, np.uint8)
        self.scored = np.zeros(0, np.bool_)
        self.wants_drafts = np.zeros(0, np.bool_)
        self.ignores_end = np.zeros(0, np.bool_)
        self.has_stopping = np.zeros(0, np.bool_)
        self.has_proposals = np.zeros(0, np.bool_)
        self.proposals = np.zeros((0, proposals), np.int64)
        """What another engine's draft proposed and nobody verified yet."""

    def __len__(self) -> int:
        """Return how many requests there are."""
        return len(self._by_key)

    def __contains__(self, key: int) -> bool:
        """Tell whether a request is known."""
        return key in self._by_key

    def slot(self, key: int) -> int | None:
        """Return a request's slot."""
        return self._by_key.get(key)

    def add(self, asked: Asked) -> int:
        """Keep a request, and return its slot."""
        if not self._free:
            self._grow()
        slot = self._free[-1]  # taken when all is written: a request that cannot be kept changes nothing
        self.keys[slot] = asked.key
        self.serials[slot] = self._count
        self.seeds[slot] = asked.seed
        self.mixed_seeds[slot] = mixed(np.array([asked.seed], np.uint64))[0]
        self.contexts[slot] = asked.context
        self.positions[slot] = len(asked.emitted)
        self.prompts[slot] = asked.prompt_tokens
        self.missing[slot] = 0 if asked.emitted else asked.prompt_tokens
        self.ends[slot] = asked.end
        self.coldness[slot] = asked.coldness
        self.top_k[slot] = asked.top_k
        self.top_p[slot] = asked.top_p
        self.top_logprobs[slot] = asked.top_logprobs
        self.scored[slot] = asked.is_scored
        self.wants_drafts[slot] = asked.wants_drafts
        self.ignores_end[slot] = asked.ignores_end
        self.has_stopping[slot] = asked.stopping is not None
        if asked.stopping is not None:
            self.stoppings[slot] = asked.stopping
        self.has_proposals[slot] = bool(asked.proposals)
        self.proposals[slot] = padded(asked.proposals, self.proposals.shape[1])
        self._by_key[asked.key] = self._free.pop()
        self._count += 1
        return slot

    def remove(self, slots: Ids) -> None:
        """Forget requests."""
        for slot, key in zip(slots.tolist(), self.keys[slots].tolist(), strict=True):
            del self._by_key[key]
            self.stoppings.pop(slot, None)
            self._free.append(slot)

    def going(self, slots: Ids) -> Going:
        """Return where requests are, and how they go on."""
        knobs = Knobs(self.coldness[slots], self.top_k[slots], self.top_p[slots])
        return Going(self.contexts[slots], self.positions[slots], self.mixed_seeds[slots], knobs)

    def _grow(self) -> None:
        """Make room for twice as many."""
        before = self.keys.size
        size = max(_FIRST_SLOTS, 2 * before)
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                grown = np.zeros((size, *array.shape[1:]), array.dtype)
                grown[:before] = array
                setattr(self, name, grown)
        self._free += range(size - 1, before - 1, -1)
