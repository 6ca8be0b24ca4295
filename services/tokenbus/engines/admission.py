"""Validation of a request's parameters. Each ValueError names the field, the limit and the actual value."""

import math
import secrets
from collections.abc import Callable, Collection, Sequence

from tokenbus.engines.requests import Request, Stops
from tokenbus.plugins import Tokenizer
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters

_MOST_STOPS, _MOST_STOP_BYTES, _MOST_STOP_IDS = 16, 4096, 1024
"""The contract's maximum numbers of stop strings, of their bytes, and of stop token ids."""
_MOST_BYTES_A_TOKEN = 16
"""Maximum bytes of a prompt text per allowed token. Longer texts are refused before the slow encoding."""
OFFERED = frozenset({
    *("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_end_token"),
    *("include_stop_string", "include_special_tokens", "cache_salt", "priority"),
})  # fmt: skip
"""Names of the sampling parameters that the engines accept, including some that have no effect."""
_NEUTRAL: dict[str, float] = {"repetition_penalty": 1}
"""Value that disables each listed parameter. The protobuf default disables any other parameter."""


def check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name}: {least} to {most}, got {value}")


def check_ids(name: str, ids: Sequence[int], size: int) -> None:
    """Raise ValueError if a token id is not below `size`, the size of the vocabulary."""
    if ids and max(ids) >= size:
        index, wrong = next((index, token) for index, token in enumerate(ids) if token >= size)
        raise ValueError(f"{name}[{index}]: below {size}, got {wrong}: out of vocabulary")


def check_offered(sampling: SamplingParameters, offered: Collection[str] = OFFERED) -> None:
    """Raise ValueError if a sampling parameter that is not in `offered` has a value other than its default."""
    for field, value in sampling.ListFields():
        neutral = _NEUTRAL.get(field.name, field.default_value)
        if field.name in offered or (value == neutral and not field.is_repeated):
            continue
        if field.is_repeated:
            limit, got = "no element", str(len(value))
        elif field.message_type is not None:
            limit, got = "none", value.WhichOneof("constraint")
        elif isinstance(value, str):
            limit, got = "none", repr(value)
        else:
            limit, got = f"only {neutral:g}", f"{value:g}" if isinstance(value, float) else str(value)
        raise ValueError(f"sampling.{field.name}: {limit} with this engine, got {got}")


def request_of(generate: Generate, tokenizer: Tokenizer, *, context: int, max_top_logprobs: int) -> Request:
    """Validate and convert a request. Raise ValueError for the first invalid parameter."""
    if not generate.request_id:
        raise ValueError("request_id: at least 1, got 0")
    sampling, size = generate.sampling, tokenizer.vocabulary_size
    check_offered(sampling)
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    if not 0 <= temperature < math.inf:
        raise ValueError(f"sampling.temperature: a finite number of at least 0, got {temperature}")
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise ValueError(f"sampling.top_p: above 0 and at most 1, got {top_p}")
    has_most = sampling.HasField("max_tokens")
    is_alone = generate.HasField("prompt_scoring") and generate.prompt_scoring.without_generation
    if has_most and not sampling.max_tokens and not is_alone:
        raise ValueError("sampling.max_tokens: at least 1, got 0")
    is_scored, most_logprobs = generate.HasField("top_logprobs"), min(max_top_logprobs, size)
    if generate.top_logprobs > most_logprobs:
        raise ValueError(f"top_logprobs: at most {most_logprobs}, got {generate.top_logprobs}")
    stops = _stops(sampling, tokenizer)
    prompt = prompt_of(generate, tokenizer.encode, size, context - 1)
    room = context - len(prompt)
    return Request(
        request_id=generate.request_id,
        prompt=prompt,
        most=1 if is_alone else min(sampling.max_tokens, room) if has_most else room,
        temperature=temperature,
        top_p=top_p,
        top_k=sampling.top_k,
        seed=int(sampling.seed) if sampling.HasField("seed") else generate.drawn_seed or secrets.randbits(64),
        stops=stops,
        ignores_end=sampling.ignore_end_token,
        is_scored=is_scored,
        top_logprobs=generate.top_logprobs if is_scored else 0,
        wants_drafts=generate.include_draft_logprobs,
        token_scoring=generate.token_scoring if generate.HasField("token_scoring") else None,
    )


def continue_from(request: Request, token_ids: Sequence[int], vocabulary_size: int, end_token: int) -> None:
    """Set the tokens that earlier workers computed for the request. After a ValueError the request must not be used."""
    name, ids = "continuation.token_ids", list(token_ids)
    check_ids(name, ids, vocabulary_size)
    if end_token in ids and not request.ignores_end:
        raise ValueError(f"{name}: no token that ends the request, got the end token")
    if len(ids) >= request.most:
        raise ValueError(f"{name}: less than the request's {request.most} tokens, got {len(ids)}")
    if request.stops is not None and request.stops.add(ids):
        raise ValueError(f"{name}: no token that ends the request, got a stop")
    request.output = ids


def prompt_of(generate: Generate, encode: Callable[[str], list[int]], vocabulary_size: int, most: int) -> list[int]:
    """Return the prompt's token ids. Raise ValueError if the prompt has more than `most` tokens."""
    if generate.WhichOneof("prompt") == "tokens":
        name, prompt = "tokens.token_ids", list(generate.tokens.token_ids)
        check_ids(name, prompt, vocabulary_size)
    else:
        name, text = "text.text", generate.text.text
        size, most_bytes = len(text.encode()), most * _MOST_BYTES_A_TOKEN
        if size > most_bytes:
            raise ValueError(f"{name}: at most {most_bytes} bytes, got {size}")
        prompt = encode(text) if text else []
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
    for index, text in enumerate(strings):
        if not 1 <= len(text.encode()) <= _MOST_STOP_BYTES:
            raise ValueError(f"sampling.stop[{index}]: 1 to {_MOST_STOP_BYTES} bytes, got {len(text.encode())}")
    return Stops(tokenizer, strings, ids) if ids or strings else None
