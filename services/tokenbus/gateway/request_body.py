"""Reads request bodies within bounds, and checks them against the types of the OpenAPI document."""

import asyncio
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect, Request

from tokenbus.gateway import bodies
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.fairness import HeldBody
from tokenbus.gateway.generate_body import Generate, SamplingParams
from tokenbus.gateway.messages_body import Messages, TokenCount
from tokenbus.gateway.responses_body import Responses
from tokenbus.gateway.unknown_fields import ignored_fields
from tokenbus.gateway.validation import check, check_depth, converted, depth_of, invalid
from tokenbus.settings import GatewaySettings, Settings
from tokenbus.settings.errors import shown

B = TypeVar("B", bound=bodies.Body)
_MAX_DISCARDED_BYTES = 16 * 2**20
"""Maximum number of bytes to read from a body that is too large. Clients read the error only after sending the body."""
_ID_DIGITS = re.compile("[0-9]{1,10}")
_MOST_SHOWN = 8
_MAX_STOP_BYTES, _MAX_TEXT_BYTES = 4096, 256
"""The contract's limit of a stop text, and the limit of a bad word or a cache salt, both in bytes."""


async def read_body(request: Request, settings: GatewaySettings, held: HeldBody) -> bytearray:
    """Return the body of a request, counted in `held` while the body is received.

    Raises an ApiError if the body is not declared as JSON, is too large or arrives too slowly.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content-type: application/json, got {kind[:100]!r}", code="unsupported_media_type")
    try:
        async with asyncio.timeout(settings.request_timeout_ms / 1000):
            return await _read(request, settings.max_body_bytes, held)
    except TimeoutError:
        message = f"body: within {settings.request_timeout_ms} ms"
        raise ApiError(408, message, code="request_timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "body: incomplete, the client closed the connection", code="incomplete_body") from None


async def _read(request: Request, most: int, held: HeldBody) -> bytearray:
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 20 else 0  # noqa: PLR2004
    if size > _MAX_DISCARDED_BYTES:
        raise _too_large(most, size)
    body, size = bytearray(), 0  # joining chunks would take twice the memory
    async for chunk in request.stream():
        size += len(chunk)
        if size <= most:
            body += chunk
            held.grow_to(size)
        elif size > _MAX_DISCARDED_BYTES:
            raise _too_large(most, size)
    if size > most:
        raise _too_large(most, size)
    return body


def _too_large(most: int, size: int) -> ApiError:
    return ApiError(413, f"body: at most {most} bytes, got {size} or more", code="request_too_large")


class RequestTypes:
    """The types of request bodies, with bounds from the settings."""

    def __init__(self, settings: Settings) -> None:
        gateway, limits = settings.gateway, settings.limits
        self._token_id = token_id = _integer(0, limits.max_token_id)
        self._ids = _array(token_id, 1, gateway.max_prompt_tokens)
        # msgspec has no unions of lists, so `_prompts` chooses the type by the first element.
        texts, id_lists = (_array(each, 1, gateway.max_choices) for each in (bodies.Text, self._ids))
        self._several: dict[type, Any] = {str: texts, list: id_lists}
        prompts = [msgspec.json.schema(kind) for kind in (bodies.Text, texts, self._ids, id_lists)]
        tokens, alternatives = _integer(1, gateway.max_tokens), _integer(0, limits.max_top_k)
        bounds = {
            "n": _integer(1, gateway.max_choices),
            "max_tokens": tokens,
            "max_completion_tokens": tokens,
            "max_output_tokens": tokens,
            "min_tokens": _integer(0, gateway.max_tokens),
            "top_logprobs": alternatives,
            "stop_token_ids": _array(token_id, 0, 1024),
            "allowed_token_ids": _array(token_id, 1, 65_536),
            "tokens": self._ids,
            "prompt_logprobs": alternatives,
            "prompt_logprob_token_ids": _array(token_id, 1, 256),
            "logprob_token_ids": _array(token_id, 1, bodies.MOST_NAMED),
            "return_logprobs_of": _array(token_id, 1, bodies.MOST_NAMED),
            "return_mask": _integer(0, bodies.MOST_MASKED),
            "truncate_prompt_tokens": Annotated[int, Meta(ge=-1, extra_json_schema={"not": {"const": 0}})],
            "logit_bias": Annotated[Any, bodies.says("", anyOf=[_biases_up_to(limits.max_token_id), {"type": "null"}])],
        }
        of_completions = {
            "max_tokens": _integer(0, gateway.max_tokens),
            "logprobs": alternatives,
            "prompt": Annotated[Any, bodies.says("", anyOf=prompts)],
        }
        own: dict[type[bodies.Body], dict[str, Any]] = {
            bodies.ChatBatch: {"messages": _array(bodies.Conversation, 1, gateway.max_choices)},
            bodies.Completion: of_completions,
            Generate: {"token_ids": self._ids, "sampling_params": _bounded(SamplingParams, bounds | of_completions)},
        }
        kinds: list[type[bodies.Body]] = [bodies.Chat, Messages, TokenCount, Responses]
        kinds += [bodies.Inspection, bodies.Tokenization, bodies.Detokenization, *own]
        self.bounded = {kind: _bounded(kind, bounds | own.get(kind, {})) for kind in kinds}
        self.ignored: list[str] = []

    def read(self, kind: type[B], value: Any) -> B:  # noqa: ANN401 - JSON
        """Convert a body to a type with bounds. Raises an ApiError that names the field, the limit and the value.

        The prompt of a completion becomes a list of prompts.
        """
        for name, member in value.items() if isinstance(value, dict) else [("", value)]:
            if isinstance(member, (dict, list)):
                check_depth(name, depth_of(member))
        if isinstance(value, dict):
            # A null is treated as an absent field.
            value = {name: _integral(member) for name, member in value.items() if member is not None}
        body: B = converted(value, self.bounded[kind])
        self.ignored = ignored_fields(body, value)
        self._check(body)
        if isinstance(body, bodies.Completion):
            body.prompt = self._prompts(body.prompt)
        if isinstance(body, Generate):
            try:
                self._check(body.sampling_params)
            except ApiError as error:
                raise error.renamed({str(error.param): f"sampling_params.{error.param}"}) from None
        return body

    def _check(self, body: bodies.Body) -> None:
        if isinstance(body, bodies.Sampling):
            check_texts(body)
        if isinstance(body, bodies.EngineSampling) and body.logit_bias is not None:
            body.logit_bias = self._biases(body.logit_bias)

    def _biases(self, given: Any) -> dict[int, float]:  # noqa: ANN401 - JSON
        # Errors of msgspec would not name the wrong key or index.
        check(isinstance(given, dict), "logit_bias", "expected object | null", given)
        if len(given) > bodies.MAX_BIASED:
            raise invalid(
                "logit_bias", f"expected object of length <= {bodies.MAX_BIASED}, got a length of {len(given)}"
            )
        if wrong := [shown(key) for key in given if _ID_DIGITS.fullmatch(key) is None]:
            raise invalid("logit_bias", f"expected token ids in digits, got {', '.join(wrong[:_MOST_SHOWN])}")
        biases = {}
        for key, bias in given.items():
            token_id = converted(int(key), self._token_id, "logit_bias")
            biases[token_id] = max(-bodies.MAX_BIAS, min(bodies.MAX_BIAS, converted(bias, float, f"logit_bias.{key}")))
        return biases

    def _prompts(self, given: Any) -> list[Any]:  # noqa: ANN401 - JSON
        if not isinstance(given, list):
            return [converted(given, bodies.Text, "prompt")]
        kind = self._several.get(type(given[0])) if given else None
        return [converted(given, self._ids, "prompt")] if kind is None else list(converted(given, kind, "prompt"))


def check_texts(body: bodies.Sampling) -> None:
    """Raise an ApiError for a text with too many bytes for the contract. The types bound only characters."""
    given = [("stop", body.stop, _MAX_STOP_BYTES)]
    if isinstance(body, bodies.EngineSampling):
        given += [("bad_words", body.bad_words, _MAX_TEXT_BYTES)]
    if isinstance(body, bodies.FullSampling):
        given += [("cache_salt", body.cache_salt, _MAX_TEXT_BYTES)]
    for name, texts, most in given:
        for index, text in enumerate([texts] if isinstance(texts, str) else texts or ()):
            size = len(text.encode())
            if size > most:
                where = name if isinstance(texts, str) else f"{name}[{index}]"
                raise invalid(where, f"at most {most} bytes, got {size}")


def _biases_up_to(most: int) -> dict[str, Any]:
    """Return the JSON Schema of `logit_bias` for token ids up to `most`."""
    digits = str(most)
    alternatives = [digits, *([f"[0-9]{{1,{len(digits) - 1}}}"] if len(digits) > 1 else [])]
    for index, digit in enumerate(digits):
        if digit > "0":
            alternatives.append(f"{digits[:index]}[0-{int(digit) - 1}][0-9]{{{len(digits) - index - 1}}}")
    return {
        "type": "object",
        "maxProperties": bodies.MAX_BIASED,
        "propertyNames": {"pattern": f"^({'|'.join(alternatives)})$"},
        "additionalProperties": {"type": "number"},
    }


def _integer(low: int, high: int) -> Any:  # noqa: ANN401 - a type
    return Annotated[int, Meta(ge=low, le=high)]


def _array(kind: Any, low: int, high: int) -> Any:  # noqa: ANN401 - a type
    return Annotated[list[kind], Meta(min_length=low, max_length=high)]


def _bounded(kind: type[B], bounds: Mapping[str, Any]) -> type[B]:
    """Return a subclass of `kind` whose fields have the types in `bounds`. Fields with a default may also be null."""
    hints, fields = get_type_hints(kind, include_extras=True), []
    for field in msgspec.structs.fields(kind):
        if field.name in bounds:
            bound: Any = bounds[field.name] if field.required else bounds[field.name] | None
            fields.append((field.name, Annotated[bound, *hints[field.name].__metadata__], field.default))
    return cast("type[B]", msgspec.defstruct(kind.__name__, fields, bases=(kind,), kw_only=True))


def _integral(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return numbers such as 5.0 as integers. JSON Schema accepts 5.0 as an integer, msgspec does not."""
    if type(value) is float:
        return int(value) if value.is_integer() else value
    if type(value) is list and not {float, list}.isdisjoint(map(type, value)):
        return list(map(_integral, value))
    return value
