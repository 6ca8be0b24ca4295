"""Requests: the open requests of an engine in arrays with one slot per request, for vectorized steps."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tokenbus.engines.sampling import Ids, SamplingParams
from tokenbus.plugins import Tokenizer
from tokenbus_contracts.batch import FIRST_STOP_TEXT, STOP_TOKEN
from tokenbus_contracts.generated.request_pb2 import TokenScoring

_FIRST_SLOTS = 64


class Stops:
    """The stop strings and stop tokens of a request. A stop string may span several tokens."""

    __slots__ = ("_strings", "_tail_size", "_token_ids", "_tokenizer", "tail")

    def __init__(self, tokenizer: Tokenizer, strings: Iterable[str], token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._strings = [text.encode() for text in strings]
        self._token_ids = frozenset(token_ids)
        self._tail_size = max((len(text) - 1 for text in self._strings), default=0)
        self.tail = b""
        """Last bytes of the output, which may contain the beginning of a stop string."""

    def find(self, token_ids: Sequence[int]) -> tuple[int | None, int, bytes]:
        """Return the index of the first token that completes a stop (or None), the stop's code, and the new tail."""
        tail = self.tail
        for index, token_id in enumerate(token_ids):
            if token_id in self._token_ids:
                return index, STOP_TOKEN, tail
            if self._strings:
                text = tail + self._tokenizer.token_bytes(token_id)
                found = [(text.find(stop) + len(stop), at) for at, stop in enumerate(self._strings) if stop in text]
                if found:
                    return index, FIRST_STOP_TEXT + min(found)[1], tail
                tail = text[len(text) - self._tail_size :] if self._tail_size < len(text) else text
        return None, 0, tail

    def add(self, token_ids: Sequence[int]) -> bool:
        """Append tokens to the output, and return whether any token completes a stop."""
        index, _, self.tail = self.find(token_ids)
        return index is not None


@dataclass(slots=True, kw_only=True)
class Request:
    """A validated request, possibly with the output of earlier turns."""

    request_id: int
    prompt: list[int]
    most: int
    """Maximum number of output tokens."""
    temperature: float
    """Sampling temperature, where 0 means greedy."""
    top_p: float
    top_k: int
    """How many of the most probable tokens may be sampled, or 0 for all tokens."""
    seed: int
    stops: Stops | None
    ignores_end: bool
    """Whether the request continues after the end token."""
    is_scored: bool
    top_logprobs: int
    wants_drafts: bool
    token_scoring: TokenScoring | None = None
    """Extra scores that the request asks for."""
    output: list[int] = field(default_factory=list)


class Requests:
    """The open requests, in arrays indexed by slot. Slots are reused, but serial numbers are not."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._count = 0
        self.stops: dict[int, Stops] = {}
        """Stops by slot, for requests that have stops."""
        self.token_scorings: dict[int, TokenScoring] = {}
        """Requested extra scores by slot, for requests that ask for extra scores."""
        self.request_ids = np.zeros(0, np.uint64)
        self.serials = np.zeros(0, np.int64)
        """Serial number of each request. Serial numbers increase in the order of admission."""
        self.seeds = np.zeros(0, np.uint64)
        self.temperatures = np.zeros(0)
        self.top_ks = np.zeros(0, np.int64)
        self.top_ps = np.zeros(0)
        self.positions = np.zeros(0, np.int64)
        """Number of output tokens of each request."""
        self.prompts = np.zeros(0, np.int64)
        """Number of prompt tokens of each request."""
        self.missing = np.zeros(0, np.int64)
        """Number of tokens to compute before the next token can be sampled."""
        self.ends = np.zeros(0, np.int64)
        """Maximum number of output tokens of each request."""
        self.places = np.zeros(0, np.int64)
        """Index of each running request in the engine's cache."""
        self.steps = np.zeros(0, np.int64)
        """Number of decode steps since each request started or resumed."""
        self.top_logprobs = np.zeros(0, np.uint8)
        self.scored = np.zeros(0, np.bool_)
        self.wants_drafts = np.zeros(0, np.bool_)
        self.ignores_end = np.zeros(0, np.bool_)

    def __len__(self) -> int:
        return len(self._slots)

    def slot(self, request_id: int) -> int | None:
        return self._slots.get(request_id)

    def add(self, request: Request) -> int:
        if not self._free:
            self._grow()
        slot = self._free[-1]  # the slot is taken from the free list last, so that a failure changes nothing
        self.request_ids[slot] = request.request_id
        self.serials[slot] = self._count
        self.seeds[slot] = request.seed
        self.temperatures[slot] = request.temperature
        self.top_ks[slot] = request.top_k
        self.top_ps[slot] = request.top_p
        self.positions[slot] = len(request.output)
        self.prompts[slot] = len(request.prompt)
        self.missing[slot] = self.to_compute(np.array([slot]))[0]
        self.ends[slot] = request.most
        self.top_logprobs[slot] = request.top_logprobs
        self.scored[slot] = request.is_scored
        self.wants_drafts[slot] = request.wants_drafts
        self.ignores_end[slot] = request.ignores_end
        self._write(slot, request)
        if request.stops is not None:
            self.stops[slot] = request.stops
        if request.token_scoring is not None:
            self.token_scorings[slot] = request.token_scoring
        self._slots[request.request_id] = self._free.pop()
        self._count += 1
        return slot

    def remove(self, slots: Ids) -> None:
        for slot, request_id in zip(slots.tolist(), self.request_ids[slots].tolist(), strict=True):
            del self._slots[request_id]
            self.stops.pop(slot, None)
            self.token_scorings.pop(slot, None)
            self._free.append(slot)

    def params(self, slots: Ids) -> SamplingParams:
        return SamplingParams(self.temperatures[slots], self.top_ks[slots], self.top_ps[slots], self.seeds[slots])

    def to_compute(self, slots: Ids) -> Ids:
        """Return how many tokens each slot must compute before it continues: all except the last output token."""
        return np.asarray(self.prompts[slots] + np.maximum(self.positions[slots] - 1, 0))

    def _write(self, slot: int, request: Request) -> None:
        """Store a request's values in the arrays that a subclass adds."""

    def _grow(self) -> None:
        before = self.request_ids.size
        size = max(_FIRST_SLOTS, 2 * before)
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                grown = np.zeros((size, *array.shape[1:]), array.dtype)
                grown[:before] = array
                setattr(self, name, grown)
        self._free += range(size - 1, before - 1, -1)


class SequenceRequests(Requests):
    """Requests with the token ids of their prompts and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.token_ids: dict[int, list[int]] = {}

    def remove(self, slots: Ids) -> None:
        super().remove(slots)
        for slot in slots.tolist():
            del self.token_ids[slot]

    def _write(self, slot: int, request: Request) -> None:
        self.token_ids[slot] = request.prompt + request.output
