"""Admission that engines share: engine options, and the check of a request's parameters.

A wrong value is a ValueError of one line with the field, the limit and the value.
"""

import math
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from google.protobuf.descriptor import FieldDescriptor

from tokenbus_contracts.batch import FIRST_STOP_TEXT, STOP_TOKEN
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters
from tokenbus_services.plugins import Tokenizer

Role = Literal["mixed", "prefill", "decode"]
_MOST_STOPS, _MOST_STOP_BYTES, _MOST_STOP_IDS = 16, 256, 64
"""The contract's own bounds."""
_MOST_BYTES_A_TOKEN = 16
"""A longer text is not encoded: few texts have so long tokens throughout, and encoding may take long."""
OFFERED = frozenset({
    *("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_end_token"),
    *("include_stop_string", "include_special_tokens", "cache_salt"),
})  # fmt: skip
"""The sampling parameters of an engine that chooses tokens, ends requests at stops, and caches no prompts.

`include_stop_string` changes the text that a client makes of the tokens, and not the tokens. Where special tokens have
no text, `include_special_tokens` changes nothing; without a cache, `cache_salt` does not.
"""
_NEUTRAL: dict[str, float] = {"repetition_penalty": 1}
"""The neutral values that are not zero, false or empty."""


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Raise a ValueError for a number that is out of its range."""
    if not least <= value <= most:
        raise ValueError(f"{name}: {least} to {most}, got {value}")


def check_offered(sampling: SamplingParameters, offered: Collection[str] = OFFERED) -> None:
    """Raise a ValueError for a sampling parameter that the engine does not offer, unless its value changes nothing."""
    for field, value in sampling.ListFields():
        if field.name in offered:
            continue
        is_plain = not field.is_repeated and field.message_type is None
        if not is_plain or value != _NEUTRAL.get(field.name, field.default_value):
            raise ValueError(f"sampling.{field.name}: {_shown(field, value)}")


def _shown(field: FieldDescriptor, value: Any) -> str:  # noqa: ANN401 - of any field
    """Return the limit and the value of a parameter that the engine does not offer."""
    if field.is_repeated:
        return f"no element with this engine, got {len(value)}"
    if field.message_type is not None:
        return f"none with this engine, got {value.WhichOneof('constraint')}"
    if isinstance(value, str):
        return f"none with this engine, got {value!r}"
    neutral = _NEUTRAL.get(field.name, field.default_value)
    if isinstance(value, float):
        return f"only {neutral:g} with this engine, got {value:g}"
    return f"only {neutral} with this engine, got {value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine runs. An option out of range is a ValueError with the option, the limit and the value."""

    role: Role = "mixed"
    """mixed: whole requests; prefill: prompts and first tokens; decode: the tokens after those."""
    speculate: int = 3
    """How many tokens are drafted for a row in a step; 0: none, and each row gets one token a step."""
    max_running: int = 256
    """The most requests in a step; others wait."""
    context: int = 2048
    """The most tokens of a request's prompt and output together."""
    prefill_chunk: int = 512
    """The most tokens of prompts in a step."""
    max_top_logprobs: int = 20
    """The most alternatives that a request may ask for."""

    def check(self, *, speculate: int, context: int, top_logprobs: int) -> None:
        """Refuse an option out of range; the arguments are the engine's own limits."""
        if self.role not in get_args(Role):
            raise ValueError(f"role: one of {', '.join(get_args(Role))}, got {self.role!r}")
        check_range("speculate", self.speculate, 0, speculate)
        check_range("context", self.context, 2, context)
        check_range("max_running", self.max_running, 1, 1024)
        check_range("prefill_chunk", self.prefill_chunk, 1, context)
        check_range("max_top_logprobs", self.max_top_logprobs, 0, top_logprobs)


class FoundStop(NamedTuple):
    """Which of some tokens completes a stop, if one does."""

    place: int | None
    """The token's place among them."""
    stop: int
    """Which stop, as `StepArrays.stops` has it."""
    tail: bytes
    """The end of the output's bytes behind them."""


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

    def find(self, token_ids: Sequence[int]) -> FoundStop:
        """Return which of the next tokens completes a stop, if one does, and the tail after them. Changes nothing.

        Of several strings that a token completes, it is the one that ends first.
        """
        tail = self.tail
        for place, token_id in enumerate(token_ids):
            if token_id in self._token_ids:
                return FoundStop(place, STOP_TOKEN, tail)
            if self._strings:
                text = tail + self._tokenizer.token_bytes(token_id)
                found = [(text.find(stop) + len(stop), at) for at, stop in enumerate(self._strings) if stop in text]
                if found:
                    return FoundStop(place, FIRST_STOP_TEXT + min(found)[1], tail)
                tail = text[len(text) - self._tail_size :] if self._tail_size < len(text) else text
        return FoundStop(None, 0, tail)

    def take(self, token_ids: Sequence[int]) -> int | None:
        """Add the next tokens to the output, and return which of them completes a stop, if one does."""
        found = self.find(token_ids)
        self.tail = found.tail
        return found.place


@dataclass(slots=True, kw_only=True)
class RequestParameters:
    """A request's parameters, checked; absent ones have their defaults."""

    key: int
    prompt: list[int]
    most: int
    """The most tokens of its output."""
    temperature: float
    """0: the most probable token is taken."""
    top_p: float
    top_k: int
    """0: all tokens."""
    seed: int
    is_seeded: bool
    """Whether the client gave the seed; else the engine drew it."""
    stops: Stops | None
    ignores_end: bool
    """Whether the end token does not end it."""
    is_scored: bool
    top_logprobs: int
    wants_drafts: bool


R = TypeVar("R", bound=RequestParameters)


def parameters_of(generate: Generate, options: EngineOptions, tokenizer: Tokenizer, kind: type[R]) -> R:
    """Return a request's parameters as an object of the given kind, or raise a ValueError."""
    if not generate.request_key:
        raise ValueError("request_key: at least 1, got 0")
    sampling, size = generate.sampling, tokenizer.vocabulary_size
    check_offered(sampling)
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    if not 0 <= temperature < math.inf:
        raise ValueError(f"sampling.temperature: a finite number of at least 0, got {temperature}")
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise ValueError(f"sampling.top_p: above 0 and at most 1, got {top_p}")
    has_most = sampling.HasField("max_tokens")
    if has_most and not sampling.max_tokens:
        raise ValueError("sampling.max_tokens: at least 1, got 0")
    is_scored, most_logprobs = generate.HasField("top_logprobs"), min(options.max_top_logprobs, size)
    if generate.top_logprobs > most_logprobs:
        raise ValueError(f"top_logprobs: at most {most_logprobs}, got {generate.top_logprobs}")
    stops = _stops(sampling, tokenizer)
    prompt = prompt_of(generate, tokenizer, options.context - 1)
    room = options.context - len(prompt)
    return kind(
        key=generate.request_key,
        prompt=prompt,
        most=min(sampling.max_tokens, room) if has_most else room,
        temperature=temperature,
        top_p=top_p,
        top_k=sampling.top_k,
        seed=int(sampling.seed) if sampling.HasField("seed") else secrets.randbits(64),
        is_seeded=sampling.HasField("seed"),
        stops=stops,
        ignores_end=sampling.ignore_end_token,
        is_scored=is_scored,
        top_logprobs=generate.top_logprobs if is_scored else 0,
        wants_drafts=generate.include_draft_logprobs,
    )


def check_role(role: Role, state: bytes | None) -> None:
    """Refuse a request without a state for a decode engine, and one with a state for a prefill engine."""
    if role == "decode" and state is None:
        raise ValueError("state: a decode engine goes on from a prefill engine's, got none")
    if role == "prefill" and state is not None:
        raise ValueError("state: none for a prefill engine, got one")


def prompt_of(generate: Generate, tokenizer: Tokenizer, most: int) -> list[int]:
    """Return the prompt's tokens, which leave room for one more at least."""
    if generate.WhichOneof("prompt") == "tokens":
        name, prompt = "tokens.token_ids", list(generate.tokens.token_ids)
        check_ids(name, prompt, tokenizer.vocabulary_size)
    else:
        name, text = "text.text", generate.text.text
        size, most_bytes = len(text.encode()), most * _MOST_BYTES_A_TOKEN
        if size > most_bytes:
            raise ValueError(f"{name}: at most {most_bytes} bytes, got {size}")
        prompt = tokenizer.encode(text) if text else []
    if not prompt:
        raise ValueError(f"{name}: at least 1 token, got none")
    if len(prompt) > most:
        raise ValueError(f"{name}: at most {most} tokens, got {len(prompt)}")
    return prompt


def _stops(sampling: SamplingParameters, tokenizer: Tokenizer) -> Stops | None:
    ids, strings = sampling.stop_token_ids, sampling.stop
    if len(ids) > _MOST_STOP_IDS:
        raise ValueError(f"sampling.stop_token_ids: at most {_MOST_STOP_IDS} ids, got {len(ids)}")
    check_ids("sampling.stop_token_ids", ids, tokenizer.vocabulary_size)
    if len(strings) > _MOST_STOPS:
        raise ValueError(f"sampling.stop: at most {_MOST_STOPS} texts, got {len(strings)}")
    for place, text in enumerate(strings):
        if not 1 <= len(text.encode()) <= _MOST_STOP_BYTES:
            raise ValueError(f"sampling.stop[{place}]: 1 to {_MOST_STOP_BYTES} bytes, got {len(text.encode())}")
    return Stops(tokenizer, strings, ids) if ids or strings else None


def check_ids(name: str, ids: Sequence[int], size: int) -> None:
    """Raise a ValueError for a token id that a vocabulary of that size does not have."""
    if ids and max(ids) >= size:
        place, wrong = next((at, token) for at, token in enumerate(ids) if token >= size)
        raise ValueError(f"{name}[{place}]: below {size}, got {wrong}")
