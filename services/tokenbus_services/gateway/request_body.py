"""Request bodies: read within bounds, parsed as JSON, and checked against the types that the OpenAPI document shows."""

import asyncio
import re
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta, Struct
from starlette.requests import ClientDisconnect, Request

from tokenbus_contracts import Limits
from tokenbus_services.gateway.body_fields import (
    MAX_CHARACTERS,
    MAX_NAME_CHARACTERS,
    array,
    check_depth,
    choices,
    depth_of,
    described,
    integer,
    invalid,
    optional,
    required,
    string,
    struct,
    written_depth,
)
from tokenbus_services.gateway.body_room import HeldBody
from tokenbus_services.gateway.chat_body import choice_fields, messages_type, template_fields, tool_type
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.output_form import form_fields
from tokenbus_services.settings import GatewaySettings, Settings
from tokenbus_services.settings.errors import shown

COMPLETION_TOKENS = 16
"""The default of `max_tokens` for completions, as in OpenAI's API."""
_INSPECTED_TOKENS = 128
_MAX_DISCARDED_BYTES = 16 * 2**20
"""How much of a body that is too large is still read: a client that is cut off while it writes sees no answer."""
_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 64
"""Each takes at most 4 of the 256 bytes that the contract allows."""
_MAX_TEMPERATURE = 100
_MAX_REPETITION_PENALTY = 100
_MAX_BIASED = 1024
_MAX_BIAS = 100
_MAX_BAD_WORDS = 256
_MAX_STOP_TOKENS = 64
_MAX_ALLOWED_TOKENS = 65_536
_TOKEN_ID_DIGITS = re.compile(r"[0-9]{1,10}")
_NOT_OFFERED: dict[str, Any] = {
    "echo": False,
    "best_of": 1,
    "suffix": "",
    "store": False,
}
"""Fields of OpenAI's API that the gateway does not implement, with the one value that it accepts for each."""
_MEMBER = re.compile(r"Object (missing required|contains unknown) field `(.*)`", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_PLACE = re.compile(r"\[\d+\]")


async def read_body(request: Request, settings: GatewaySettings, held: HeldBody) -> bytearray:
    """Return a request's body, counted as it comes.

    Raises an ApiError if it is not declared as JSON, too large or too slow.
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


def parse_json(data: bytes | bytearray) -> Any:  # noqa: ANN401 - JSON
    """Return the JSON value of a body; raises an ApiError if it is malformed."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if str(error).startswith("depth limit"):
            check_depth("", written_depth(data))
        raise ApiError(400, f"body: JSON in UTF-8, got an error: {error}", code="invalid_json") from None


async def _read(request: Request, most: int, held: HeldBody) -> bytearray:
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 20 else 0  # noqa: PLR2004
    if size > _MAX_DISCARDED_BYTES:
        raise _too_large(most, size)
    body, size = bytearray(), 0  # pieces to be joined would take twice the memory
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
    """The type of each route's body, with the bounds that the settings give."""

    def __init__(self, settings: Settings) -> None:
        """Define the types."""
        gateway, limits = settings.gateway, settings.limits
        text = string(1, MAX_CHARACTERS)
        self._text = text
        self._texts = array(text, 1, gateway.max_choices)
        self._ids = array(integer(0, limits.max_token_id), 1, gateway.max_prompt_tokens)
        self._id_lists = array(self._ids, 1, gateway.max_choices)
        prompts = [msgspec.json.schema(kind) for kind in (text, self._texts, self._ids, self._id_lists)]
        tokens, alternatives = integer(1, gateway.max_tokens), integer(0, limits.max_top_k)
        stop, name = string(1, _MAX_STOP_CHARACTERS), string(0, MAX_NAME_CHARACTERS)
        sampling = (
            optional(
                "temperature",
                Annotated[float, Meta(ge=0, le=_MAX_TEMPERATURE)],
                "The divisor of the logits; 0: always the most probable token.",
            ),
            optional("top_p", Annotated[float, Meta(gt=0, le=1)], "The probability mass that is kept."),
            optional("stop", stop | array(stop, 0, _MAX_STOPS), "Texts that end the answer, and are cut off."),
            optional(
                "seed",
                integer(-(2**63), 2**63 - 1),
                "Makes sampling repeatable; choice number i of a prompt uses seed + i.",
            ),
        )
        options = struct("StreamOptions", optional("include_usage", bool, "Whether a last chunk has the usage."))
        common = (
            required("model", name, "One of those that /v1/models lists."),
            *sampling,
            optional("n", integer(1, gateway.max_choices), "How many choices each prompt has.", 1),
            optional("stream", bool, "Whether the answer is sent as server-sent events.", default=False),
            optional("stream_options", options, "Only where stream is true."),
            optional("include_draft_logprobs", bool, "Adds draft_logprobs beside logprobs.", default=False),
            optional("return_token_ids", bool, "Adds token_ids and prompt_token_ids.", default=False),
            optional("return_columns", bool, "Sends logprobs as base64 columns instead.", default=False),
            optional("ignore_eos", bool, "Generates past the model's own end of text.", default=False),
            optional("user", name, "Accepted and ignored."),
            *self._choosing(gateway, limits),
            *form_fields(),
            optional("priority", integer(-(2**63), 2**63 - 1), "Which requests come first: the lowest; absent: 0."),
            optional("cache_salt", string(1, _MAX_STOP_CHARACTERS), "Prompts' states are shared within one salt."),
        )
        messages, tool = messages_type(), tool_type()
        self.completion = struct(
            "Completion",
            *common,
            (
                "prompt",
                # msgspec has no unions of lists: `read` checks the prompt by the type of its first element.
                Annotated[Any, described("A text, token ids, or several of either.", anyOf=prompts)],
            ),
            optional("max_tokens", tokens, "The most tokens of a choice.", COMPLETION_TOKENS),
            optional("add_special_tokens", bool, "Whether texts get the tokens that the model wants.", default=True),
            optional("logprobs", alternatives, "How many alternatives a token has; 0: only its own logprob."),
            *map(_not_offered, ("echo", "best_of", "suffix")),
        )
        self.chat = struct(
            "Chat",
            *common,
            required("messages", messages, "The chat so far."),
            *template_fields(tool, adds_special=False),
            *choice_fields(),
            optional("max_completion_tokens", tokens, "The most tokens of a choice; absent: as many as fit."),
            optional("max_tokens", tokens, "The older name of max_completion_tokens."),
            optional("logprobs", bool, "Whether tokens have their logprobs.", default=False),
            optional("top_logprobs", alternatives, "How many alternatives each token has; only with logprobs."),
            _not_offered("store"),
        )
        self.inspection = struct(
            "Inspection",
            required("prompt", text, "The text to continue."),
            *sampling,
            optional("max_tokens", tokens, "The most tokens.", _INSPECTED_TOKENS),
            optional("top_logprobs", alternatives, "How many alternatives each token has.", 10),
            optional("drafts", bool, "Whether rows have what the draft model proposed.", default=True),
        )

        self.tokenization = struct(
            "Tokenization",
            optional("model", name, "One of those that /v1/models lists."),
            optional("prompt", text, "The text; either this or messages."),
            optional("messages", messages, "The chat; either this or prompt."),
            *template_fields(tool, adds_special=None),
            optional("return_token_strs", bool, "Adds token_strs: the text of each token.", default=False),
        )
        self.detokenization = struct(
            "Detokenization",
            optional("model", name, "One of those that /v1/models lists."),
            required("tokens", self._ids, "The token ids."),
        )

    def read(self, kind: type[Struct], value: Any) -> Any:  # noqa: ANN401 - JSON, and one of the types above
        """Return a body as one of the types; raises an ApiError that names the field, the limit and the value.

        A completion's prompt is returned as a list of prompts.
        """
        for name, member in value.items() if isinstance(value, dict) else [("", value)]:
            check_depth(name, depth_of(member))
        if isinstance(value, dict):
            unknown = value.keys() - set(kind.__struct_fields__)
            if unknown:
                name = next(name for name in value if name in unknown)
                raise invalid(shown(name)[1:-1], f"no such field, got {shown(value[name])}")
            # null stands for a field that is left out.
            value = {name: _integral(member) for name, member in value.items() if member is not None}
            for name in value.keys() & _NOT_OFFERED.keys():
                given, accepted = value[name], _NOT_OFFERED[name]
                if given != accepted or isinstance(given, bool) != isinstance(accepted, bool):
                    raise invalid(name, f"only {accepted!r}, got {shown(given)}")
        body: Any = _convert(value, kind, "")
        if kind is self.completion:
            body.prompt = self._prompts(body.prompt)
        if kind in (self.completion, self.chat) and body.logit_bias is not None:
            body.logit_bias = self._biases(body.logit_bias)
        return body

    def _choosing(self, gateway: GatewaySettings, limits: Limits) -> list[Any]:
        """Return the fields of how tokens are chosen that OpenAI's API or vLLM's have, beside temperature and top_p."""
        token_id, word = integer(0, limits.max_token_id), string(1, _MAX_STOP_CHARACTERS)
        self._token_id = token_id
        penalty = Annotated[float, Meta(ge=-2, le=2)]
        repetition = Annotated[float, Meta(gt=0, le=_MAX_REPETITION_PENALTY)]
        biases = described(
            "What is added to single tokens' logits, by token id.",
            anyOf=[
                {
                    "type": "object",
                    "maxProperties": _MAX_BIASED,
                    "propertyNames": {"pattern": f"^{_TOKEN_ID_DIGITS.pattern}$"},
                    "additionalProperties": {"type": "number", "minimum": -_MAX_BIAS, "maximum": _MAX_BIAS},
                },
                {"type": "null"},
            ],
        )
        stop_ids = array(token_id, 0, _MAX_STOP_TOKENS)
        return [
            optional("top_k", integer(-1, 2**31 - 1), "How many of the most probable tokens are kept; -1 or 0: all."),
            optional("min_p", Annotated[float, Meta(ge=0, le=1)], "The least share of the top probability kept."),
            optional("presence_penalty", penalty, "What tokens lose that the output has already."),
            optional("frequency_penalty", penalty, "What tokens lose each time that the output has them."),
            optional("repetition_penalty", repetition, "What divides the logits of tokens that were there already."),
            ("logit_bias", Annotated[Any, biases], None),
            optional("min_tokens", integer(0, gateway.max_tokens), "The least tokens before a stop ends a choice."),
            optional("stop_token_ids", stop_ids, "Tokens that end the answer, whose text is cut off."),
            optional(
                "include_stop_str_in_output", bool, "Whether the stop that ends an answer is in it.", default=False
            ),
            optional("skip_special_tokens", bool, "Whether special tokens are left out of the text.", default=True),
            optional("bad_words", array(word, 0, _MAX_BAD_WORDS), "Texts that are not generated."),
            optional("allowed_token_ids", array(token_id, 1, _MAX_ALLOWED_TOKENS), "The only tokens to choose from."),
        ]

    def _biases(self, given: Any) -> dict[int, float]:  # noqa: ANN401 - JSON
        # msgspec tells neither the key nor the place of an entry that is wrong.
        if not isinstance(given, dict):
            raise invalid("logit_bias", f"expected object | null, got {shown(given)}")
        if len(given) > _MAX_BIASED:
            raise invalid("logit_bias", f"expected object of length <= {_MAX_BIASED}, got a length of {len(given)}")
        biases = {}
        for key, bias in given.items():
            if _TOKEN_ID_DIGITS.fullmatch(key) is None:
                raise invalid("logit_bias", f"expected token ids in digits, got {shown(key)}")
            token_id = _convert(int(key), self._token_id, "logit_bias")
            where = f"logit_bias.{key}"
            biases[token_id] = _convert(bias, Annotated[float, Meta(ge=-_MAX_BIAS, le=_MAX_BIAS)], where)
        return biases

    def _prompts(self, given: Any) -> Any:  # noqa: ANN401 - JSON
        first = given[0] if isinstance(given, list) and given else None
        if isinstance(first, str):
            return _convert(given, self._texts, "prompt")
        if isinstance(first, list):
            return _convert(given, self._id_lists, "prompt")
        return [_convert(given, self._ids if isinstance(given, list) else self._text, "prompt")]


def _not_offered(name: str) -> tuple[str, Any, None]:
    meta = described(f"Not offered: only {_NOT_OFFERED[name]!r} is accepted.", enum=[_NOT_OFFERED[name], None])
    return name, Annotated[Any, meta], None


def _integral(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return numbers such as 5.0 as integers, as JSON Schema has them; msgspec would refuse them."""
    if type(value) is float:
        return int(value) if value.is_integer() else value
    if type(value) is list and not {float, list}.isdisjoint(map(type, value)):
        return list(map(_integral, value))
    return value


def _convert(value: Any, kind: Any, where: str) -> Any:  # noqa: ANN401
    """Return a value as a type; raises an ApiError whose param begins with `where`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        # "Expected `int` <= 5 - at `$.stop[1]`": the limit and the place, to which the value is added.
        limit, found, path = str(error).rpartition(" - at `$")
        # The place in an object whose members have any name is `[...]`.
        limit, path = (limit, path[:-1].replace("[...]", "")) if found else (path, "")
    for name, index in _STEP.findall(path):
        value = value[name] if name else value[int(index)]
    where = (where + path).removeprefix(".")
    member = _MEMBER.fullmatch(limit)
    if member is not None:
        is_missing, name = member[1] == "missing required", member[2]
        where = f"{where}.{name}".removeprefix(".")
        raise invalid(where, "required, got nothing" if is_missing else f"no such field, got {shown(value[name])}")
    if limit.startswith("Invalid enum value"):
        limit = choices(_PLACE.sub("", where))
    got = f"a length of {len(value)}" if " of length " in limit else shown(value)
    raise invalid(where, f"{limit.partition(', got ')[0].replace('`', '').replace('Expected', 'expected')}, got {got}")
