"""Requests: those that the engine has, in arrays with a slot for each, and how each goes on from a hand-off."""

from dataclasses import dataclass, field

import numpy as np

from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_engines.admission import EngineOptions, RequestParameters, Stops, check_role, parameters_of
from tokenbus_engines.ngram.handoff import RequestState, read
from tokenbus_engines.ngram.model import ABSENT, WIDTH, Ids, Model
from tokenbus_engines.ngram.sampling import SamplingParams
from tokenbus_engines.ngram.speculation import Front
from tokenbus_engines.ngram.tokenizer import Tokenizer
from tokenbus_engines.sampling import mixed

_FIRST_SLOTS = 64
_COLDEST = 1e30
"""Above it nothing changes any more but that products overflow."""


@dataclass(slots=True, kw_only=True)
class Admitted(RequestParameters):
    """A request as it is admitted, perhaps with the output that a prefill engine gave it."""

    context: int = 0
    """The model's context at the end of its prompt and its output."""
    output: list[int] = field(default_factory=list)
    proposals: list[int] = field(default_factory=list)
    """What that engine's draft proposed to follow; not verified yet."""


def admitted(
    generate: Generate, state: bytes | None, model: Model, tokenizer: Tokenizer, options: EngineOptions
) -> Admitted:
    """Return a request, going on from a prefill engine's state if there is one; a ValueError says what is wrong."""
    request = parameters_of(generate, options, tokenizer, Admitted)
    check_role(options.role, state)
    request.context = model.contexts.of(request.prompt)
    if state is not None:
        _go_on(request, read(state), model, tokenizer)
    return request


def _go_on(request: Admitted, state: RequestState, model: Model, tokenizer: Tokenizer) -> None:
    """Let a request go on from a state, if that can be one of it."""
    state.check(model, len(request.prompt))
    if tokenizer.end_token in state.tokens and not request.ignores_end:
        raise ValueError("state.tokens: none that ends the request, got the end token")
    if len(state.tokens) >= request.most:
        raise ValueError(f"state.tokens: less than the {request.most} of the request, got {len(state.tokens)}")
    if request.stops is not None and request.stops.take(state.tokens) is not None:
        raise ValueError("state.tokens: none that ends the request, got one that does")
    request.context = model.contexts.of(request.prompt + state.tokens)
    at = np.array([request.context])
    for place, token in enumerate(state.proposals):
        # The draft proposes what is in its line; of anything else it has no probability, which verifying needs.
        if model.places(model.drafts[at], np.array([token]))[0] >= WIDTH:
            raise ValueError(f"state.proposals[{place}]: a token that the draft proposes there, got {token}")
        at = model.contexts.after(at, np.array([token]))
    request.seed, request.output, request.proposals = state.seed, state.tokens, state.proposals


class Requests:
    """The requests that have not ended. A slot is used again; its serial number is not."""

    def __init__(self, proposals: int, vocabulary_size: int) -> None:
        """Keep at most so many proposals of each request."""
        self._vocabulary_size = vocabulary_size
        self._by_key: dict[int, int] = {}
        self._free: list[int] = []
        self._count = 0
        self.stops: dict[int, Stops] = {}
        """By slot, of the requests that have stops of their own."""
        self.keys = np.zeros(0, np.uint64)
        self.serials = np.zeros(0, np.int64)
        """In the order of admission."""
        self.seeds = np.zeros(0, np.uint64)
        self.mixed_seeds = np.zeros(0, np.uint64)
        self.contexts = np.zeros(0, np.int64)
        """The model's context of each."""
        self.positions = np.zeros(0, np.int64)
        """How many tokens each was given."""
        self.prompts = np.zeros(0, np.int64)
        """How many tokens its prompt has."""
        self.missing = np.zeros(0, np.int64)
        """How many of its tokens are to be computed before the next one can be."""
        self.ends = np.zeros(0, np.int64)
        """How many tokens it is given at most."""
        self.coldness = np.zeros(0)
        """What logprobs are multiplied by: one over the temperature."""
        self.top_k = np.zeros(0, np.int64)
        self.top_p = np.zeros(0)
        self.top_logprobs = np.zeros(0, np.uint8)
        self.scored = np.zeros(0, np.bool_)
        self.wants_drafts = np.zeros(0, np.bool_)
        self.ignores_end = np.zeros(0, np.bool_)
        self.has_stops = np.zeros(0, np.bool_)
        self.has_proposals = np.zeros(0, np.bool_)
        self.proposals = np.zeros((0, proposals), np.int64)
        """What another engine's draft proposed and was not verified yet."""

    def __len__(self) -> int:
        """Return how many requests there are."""
        return len(self._by_key)

    def __contains__(self, key: int) -> bool:
        """Tell whether a request is known."""
        return key in self._by_key

    def slot(self, key: int) -> int | None:
        """Return a request's slot."""
        return self._by_key.get(key)

    def add(self, request: Admitted) -> int:
        """Keep a request, and return its slot."""
        if not self._free:
            self._grow()
        slot = self._free[-1]  # taken when all is written: a request that cannot be kept changes nothing
        is_greedy, size = request.temperature == 0, self._vocabulary_size
        self.keys[slot] = request.key
        self.serials[slot] = self._count
        self.seeds[slot] = request.seed
        self.mixed_seeds[slot] = mixed(np.array([request.seed], np.uint64))[0]
        self.contexts[slot] = request.context
        self.positions[slot] = len(request.output)
        self.prompts[slot] = len(request.prompt)
        self.missing[slot] = 0 if request.output else len(request.prompt)
        self.ends[slot] = request.most
        self.coldness[slot] = 1.0 if is_greedy else min(1 / request.temperature, _COLDEST)
        self.top_k[slot] = 1 if is_greedy else min(request.top_k or size, size)
        self.top_p[slot] = request.top_p
        self.top_logprobs[slot] = request.top_logprobs
        self.scored[slot] = request.is_scored
        self.wants_drafts[slot] = request.wants_drafts
        self.ignores_end[slot] = request.ignores_end
        self.has_stops[slot] = request.stops is not None
        if request.stops is not None:
            self.stops[slot] = request.stops
        self.has_proposals[slot] = bool(request.proposals)
        self.proposals[slot] = padded(request.proposals, self.proposals.shape[1])
        self._by_key[request.key] = self._free.pop()
        self._count += 1
        return slot

    def remove(self, slots: Ids) -> None:
        """Forget requests."""
        for slot, key in zip(slots.tolist(), self.keys[slots].tolist(), strict=True):
            del self._by_key[key]
            self.stops.pop(slot, None)
            self._free.append(slot)

    def front(self, slots: Ids) -> Front:
        """Return where requests are, and how their tokens are chosen."""
        params = SamplingParams(self.coldness[slots], self.top_k[slots], self.top_p[slots])
        return Front(self.contexts[slots], self.positions[slots], self.mixed_seeds[slots], params)

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


def padded(proposals: list[int], count: int) -> list[int]:
    """Return exactly `count` proposals; those that are missing are absent."""
    return [*proposals[:count], *[ABSENT] * (count - len(proposals))]
