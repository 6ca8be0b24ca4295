"""Requests: the engine's options, and the requests that it works on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_engines.admission import EngineOptions, RequestParameters, check_range, parameters_of
from tokenbus_engines.paddle.tokenizer import END, ByteTokenizer
from tokenbus_engines.paddle.weights import COMMITTED

_TOKENIZER = ByteTokenizer()


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddleOptions(EngineOptions):
    """How the engine runs. What is out of range is a ValueError with the option, the limit and the value."""

    weights: Path = COMMITTED
    device: str = "cpu"
    """As paddle names it: cpu, gpu, gpu:1."""
    max_running: int = 32
    """The most requests with a slot of the cache; others wait."""
    context: int = 1024
    """How many tokens a slot holds: a request's prompt and its output."""
    prefill_chunk: int = 256
    """The most tokens of prompts in a step."""
    slice_steps: int = 256
    """After how many steps with tokens a request gives its slot to one that waits; 0: never."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        self.check(speculate=16, context=65_536, top_logprobs=127)
        check_range("slice_steps", self.slice_steps, 0, 2**31 - 1)


class Handed(NamedTuple):
    """Keys and values of a request that a prefill engine computed."""

    keys: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32]


class Progress(NamedTuple):
    """What a step may change of a request, so that a step that fails can be undone."""

    tokens: int
    tail: bytes
    drafts: Sequence[int]
    draft_logits: npt.NDArray[np.float32] | None
    computed: int


@dataclass(slots=True, kw_only=True)
class Request(RequestParameters):
    """A request in the engine: what it asks for, and how far it is."""

    serial: int = 0
    """In the order of admission."""
    output: list[int] = field(default_factory=list)
    drafts: Sequence[int] = ()
    """What was proposed to follow, and the logits that it was drawn from."""
    draft_logits: npt.NDArray[np.float32] | None = None
    slot: int | None = None
    computed: int = 0
    """For how many tokens the slot has what attention needs."""
    steps: int = 0
    """How many steps gave it tokens in this slot, not counting its first."""
    handed: Handed | None = None
    is_aborted: bool = False

    @property
    def length(self) -> int:
        """How many tokens there are of it."""
        return len(self.prompt) + len(self.output)

    @property
    def position(self) -> int:
        """The place of its next token in its output."""
        return len(self.output)

    @property
    def to_compute(self) -> int:
        """How many tokens are to be computed before it can go on: all, or after its first token all but the last."""
        return self.length - 1 if self.output else self.length

    @property
    def is_decoding(self) -> bool:
        """Whether its next step verifies drafts."""
        return bool(self.output) and self.computed >= self.to_compute

    def tokens(self, begin: int, end: int) -> list[int]:
        """Return some of its tokens, counted from the prompt's first."""
        if end <= len(self.prompt):
            return self.prompt[begin:end]
        return (self.prompt + self.output)[begin:end]

    def append(self, token: int) -> bool:
        """Take a token, and return whether it ends the request: the end token, or one that completes a stop."""
        self.output.append(token)
        is_stop = self.stops is not None and self.stops.take([token]) is not None
        return is_stop or (token == END and not self.ignores_end)

    def progress(self) -> Progress:
        """Return how far it is."""
        tail = b"" if self.stops is None else self.stops.tail
        return Progress(len(self.output), tail, self.drafts, self.draft_logits, self.computed)

    def undo(self, before: Progress) -> None:
        """Bring it back to where it was before a step."""
        del self.output[before.tokens :]
        if self.stops is not None:
            self.stops.tail = before.tail
        self.drafts, self.draft_logits, self.computed = before.drafts, before.draft_logits, before.computed


def request_of(generate: Generate, options: PaddleOptions) -> Request:
    """Return the request that a message asks for; a ValueError says what is wrong with it."""
    return parameters_of(generate, options, _TOKENIZER, Request)


def refused(field_name: str, limit: str, actual: object) -> ValueError:
    """Return the error for a field."""
    return ValueError(f"{field_name}: {limit}, got {actual}")
