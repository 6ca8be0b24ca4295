"""Requests: those that an engine has, in arrays with a slot for each, so that a step handles all of them at once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tokenbus.engines.sampling import Ids, SamplingParams
from tokenbus.plugins import Tokenizer
from tokenbus_contracts.batch import FIRST_STOP_TEXT, STOP_TOKEN
from tokenbus_contracts.generated.request_pb2 import TokenScoring

_FIRST_SLOTS = 64


class Stops:
    """A request's own stop strings and stop tokens. A stop string may begin in one token and end in another."""

    __slots__ = ("_strings", "_tail_size", "_token_ids", "_tokenizer", "tail")

    def __init__(self, tokenizer: Tokenizer, strings: Iterable[str], token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._strings = [text.encode() for text in strings]
        self._token_ids = frozenset(token_ids)
        self._tail_size = max((len(text) - 1 for text in self._strings), default=0)
        self.tail = b""
        """The last bytes of the output, in which a stop string may have begun."""

    def find(self, token_ids: Sequence[int]) -> tuple[int | None, int, bytes]:
        """Return the first token's place that completes a stop, the stop as in `StepArrays.stops`, and the new tail."""
        tail = self.tail
        for place, token_id in enumerate(token_ids):
            if token_id in self._token_ids:
                return place, STOP_TOKEN, tail
            if self._strings:
                text = tail + self._tokenizer.token_bytes(token_id)
                found = [(text.find(stop) + len(stop), at) for at, stop in enumerate(self._strings) if stop in text]
                if found:
                    return place, FIRST_STOP_TEXT + min(found)[1], tail
                tail = text[len(text) - self._tail_size :] if self._tail_size < len(text) else text
        return None, 0, tail

    def take(self, token_ids: Sequence[int]) -> bool:
        """Add the next tokens to the output, and tell whether one of them completes a stop."""
        place, _, self.tail = self.find(token_ids)
        return place is not None


@dataclass(slots=True, kw_only=True)
class Request:
    """A request as it is admitted, perhaps with output that another engine gave it. All of it is checked."""

    key: int
    prompt: list[int]
    most: int
    temperature: float
    """0: the most probable token is taken."""
    top_p: float
    top_k: int
    """0: all tokens."""
    seed: int
    stops: Stops | None
    ignores_end: bool
    """Whether the end token does not end it."""
    is_scored: bool
    top_logprobs: int
    wants_drafts: bool
    token_scoring: TokenScoring | None = None
    """What it wants to know of its tokens beside logprobs."""
    output: list[int] = field(default_factory=list)


class Requests:
    """The open requests, in arrays by slot. An engine adds its own. A slot is used again, its serial is not."""

    def __init__(self) -> None:
        self._by_key: dict[int, int] = {}
        self._free: list[int] = []
        self._count = 0
        self.stops: dict[int, Stops] = {}
        """By slot, of the requests that have stops of their own."""
        self.token_scorings: dict[int, TokenScoring] = {}
        """By slot, of the requests that want to know more of their tokens than logprobs."""
        self.keys = np.zeros(0, np.uint64)
        self.serials = np.zeros(0, np.int64)
        """In the order of admission."""
        self.seeds = np.zeros(0, np.uint64)
        self.temperatures = np.zeros(0)
        self.top_ks = np.zeros(0, np.int64)
        self.top_ps = np.zeros(0)
        self.positions = np.zeros(0, np.int64)
        """How many tokens each was given."""
        self.prompts = np.zeros(0, np.int64)
        """How many tokens its prompt has."""
        self.missing = np.zeros(0, np.int64)
        """How many of its tokens are to be computed before the next one can be."""
        self.ends = np.zeros(0, np.int64)
        """How many tokens it is given at most."""
        self.places = np.zeros(0, np.int64)
        """Which of the engine's places it runs in; of requests that run."""
        self.steps = np.zeros(0, np.int64)
        """How many steps gave it tokens in that place, not counting its first."""
        self.top_logprobs = np.zeros(0, np.uint8)
        self.scored = np.zeros(0, np.bool_)
        self.wants_drafts = np.zeros(0, np.bool_)
        self.ignores_end = np.zeros(0, np.bool_)

    def __len__(self) -> int:
        return len(self._by_key)

    def slot(self, key: int) -> int | None:
        """Return a request's slot; None for an unknown one."""
        return self._by_key.get(key)

    def add(self, request: Request) -> int:
        """Keep a request, and return its slot."""
        if not self._free:
            self._grow()
        slot = self._free[-1]  # taken when all is written: a request that cannot be kept changes nothing
        self.keys[slot] = request.key
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
        self._by_key[request.key] = self._free.pop()
        self._count += 1
        return slot

    def remove(self, slots: Ids) -> None:
        """Forget requests."""
        for slot, key in zip(slots.tolist(), self.keys[slots].tolist(), strict=True):
            del self._by_key[key]
            self.stops.pop(slot, None)
            self.token_scorings.pop(slot, None)
            self._free.append(slot)

    def params(self, slots: Ids) -> SamplingParams:
        """Return how the tokens of requests are chosen."""
        return SamplingParams(self.temperatures[slots], self.top_ks[slots], self.top_ps[slots], self.seeds[slots])

    def to_compute(self, slots: Ids) -> Ids:
        """Return how many tokens must be computed before each continues: all, after its first all but the last."""
        return np.asarray(self.prompts[slots] + np.maximum(self.positions[slots] - 1, 0))

    def _write(self, slot: int, request: Request) -> None:
        """Write what the engine keeps of a request beside these arrays."""

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
