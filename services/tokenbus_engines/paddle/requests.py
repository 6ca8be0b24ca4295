"""Request: one that the engine works on, and what its message must be for that."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters
from tokenbus_engines.paddle.options import PaddleOptions
from tokenbus_engines.paddle.shape import END, VOCABULARY_SIZE
from tokenbus_engines.paddle.tokenizer import ByteTokenizer
from tokenbus_engines.sampling_parameters import max_tokens_of, seed_of, temperature_of, top_p_of

_TOKENIZER = ByteTokenizer()
_MOST_STOPS, _MOST_STOP_BYTES, _MOST_STOP_IDS = 16, 256, 64


class Handed(NamedTuple):
    """What a prefill engine computed of a request, to go on from there."""

    keys: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32]


@dataclass(slots=True, kw_only=True)
class Request:
    """What is wanted, and how far it is."""

    key: int
    prompt: list[int]
    most: int
    """The most tokens of output, as many as were asked for, or fit."""
    temperature: float
    top_p: float
    top_k: int
    seed: int
    is_seeded: bool
    """Whether it asked for that seed; else it was drawn."""
    stop_ids: frozenset[int]
    stop_texts: tuple[bytes, ...]
    is_scored: bool
    top_logprobs: int
    wants_drafts: bool

    output: list[int] = field(default_factory=list)
    text: bytearray = field(default_factory=bytearray)
    """The end of the output's bytes: as much as the longest stop text can have."""
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
        """Take a token, and return whether it ends the request: an end token, or the last byte of a stop text."""
        self.output.append(token)
        self.text += _TOKENIZER.token_bytes(token)
        is_stop = token in self.stop_ids or any(self.text.endswith(text) for text in self.stop_texts)
        del self.text[:-_MOST_STOP_BYTES]
        return is_stop


def request_of(generate: Generate, options: PaddleOptions) -> Request:
    """Return the request that a message asks for; a ValueError says what is wrong with it."""
    if not generate.request_key:
        raise refused("request_key", "at least 1", 0)
    sampling = generate.sampling
    prompt = _prompt(generate, options.context)
    room = options.context - len(prompt)
    is_scored = generate.HasField("top_logprobs")
    most_logprobs = min(options.max_top_logprobs, VOCABULARY_SIZE)
    if generate.top_logprobs > most_logprobs:
        raise refused("top_logprobs", f"at most {most_logprobs}", generate.top_logprobs)
    stop_ids = _stop_ids(sampling)
    return Request(
        key=generate.request_key,
        prompt=prompt,
        most=min(max_tokens_of(sampling) or room, room),
        temperature=temperature_of(sampling),
        top_p=top_p_of(sampling),
        top_k=sampling.top_k,
        seed=seed_of(sampling),
        is_seeded=sampling.HasField("seed"),
        stop_ids=stop_ids if sampling.ignore_end_token else stop_ids | {END},
        stop_texts=_stop_texts(sampling),
        is_scored=is_scored,
        top_logprobs=generate.top_logprobs if is_scored else 0,
        wants_drafts=generate.include_draft_logprobs,
    )


def refused(field_name: str, limit: str, actual: object) -> ValueError:
    """Return the error for a request's field."""
    return ValueError(f"{field_name}: {limit}, got {actual}")


def _prompt(generate: Generate, context: int) -> list[int]:
    """Return the prompt's tokens: a text begins with the token for that, token ids are taken as they are."""
    if generate.WhichOneof("prompt") == "tokens":
        name, tokens = "tokens.token_ids", list(generate.tokens.token_ids)
        for place, token in enumerate(tokens):
            if token >= VOCABULARY_SIZE:
                raise refused(f"{name}[{place}]", f"below {VOCABULARY_SIZE}, the vocabulary's size", token)
    else:
        name, text = "text", generate.text.text
        tokens = _TOKENIZER.encode(text) if text else []
    if not tokens:
        raise refused("prompt", "at least one token", "none")
    if len(tokens) >= context:
        raise refused(name, f"at most {context - 1} tokens, so that one more fits", len(tokens))
    return tokens


def _stop_texts(sampling: SamplingParameters) -> tuple[bytes, ...]:
    texts = tuple(text.encode() for text in sampling.stop)
    if len(texts) > _MOST_STOPS:
        raise refused("sampling.stop", f"at most {_MOST_STOPS} texts", len(texts))
    for place, text in enumerate(texts):
        if not 1 <= len(text) <= _MOST_STOP_BYTES:
            raise refused(f"sampling.stop[{place}]", f"1 to {_MOST_STOP_BYTES} bytes", len(text))
    return texts


def _stop_ids(sampling: SamplingParameters) -> frozenset[int]:
    ids = sampling.stop_token_ids
    if len(ids) > _MOST_STOP_IDS:
        raise refused("sampling.stop_token_ids", f"at most {_MOST_STOP_IDS} ids", len(ids))
    for place, token in enumerate(ids):
        if token >= VOCABULARY_SIZE:
            limit = f"below {VOCABULARY_SIZE}, the vocabulary's size"
            raise refused(f"sampling.stop_token_ids[{place}]", limit, token)
    return frozenset(ids)
