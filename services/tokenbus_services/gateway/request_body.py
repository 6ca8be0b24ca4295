"""Request bodies: read within bounds, parsed as JSON, and checked against the types that the OpenAPI document shows."""

import asyncio
import re
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta, Struct
from starlette.requests import ClientDisconnect, Request

from tokenbus_contracts import Limits
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.settings import GatewaySettings, Settings
from tokenbus_services.settings.errors import shown

COMPLETION_TOKENS = 16
"""The default of `max_tokens` for completions, as in OpenAI's API."""
_INSPECTED_TOKENS = 128
_MAX_DISCARDED_BYTES = 16 * 2**20
"""How much of a body that is too large is still read: a client that is cut off while it writes sees no answer."""
_MAX_CHARACTERS = 4_194_304
_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 64
"""Each takes at most 4 of the 256 bytes that the contract allows."""
_MAX_NAME_CHARACTERS = 256
_MAX_MESSAGES = 1024
_MAX_PARTS = 64
_MAX_TEMPERATURE = 100
_MAX_REPETITION_PENALTY = 100
_MAX_BIASED = 1024
_MAX_BIAS = 100
_MAX_BAD_WORDS = 256
_MAX_STOP_TOKENS = 64
_MAX_ALLOWED_TOKENS = 65_536
_MAX_PATTERN_CHARACTERS = 4096
_MAX_FORM_CHARACTERS = 65_536
_MAX_FORM_BYTES = 262_144
_MAX_CHOICE_TEXTS = 1024
_TOKEN_ID_DIGITS = re.compile(r"[0-9]{1,10}")
_ENUMS = {
    "role": ("system", "developer", "user", "assistant"),
    "type": ("text",),
    "response_format.type": ("text", "json_object", "json_schema"),
}
_NOT_OFFERED: dict[str, Any] = {
    "echo": False,
    "best_of": 1,
    "suffix": "",
    "skip_special_tokens": True,
    "tools": [],
    "store": False,
}
"""Fields of OpenAI's API that the gateway does not implement, with the one value that it accepts for each."""
_MEMBER = re.compile(r"Object (missing required|contains unknown) field `(.*)`", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


async def read_body(request: Request, settings: GatewaySettings) -> bytes:
    """Return a request's body; raises an ApiError if it is not declared as JSON, too large or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content-type: application/json, got {kind[:100]!r}", code="unsupported_media_type")
    try:
        async with asyncio.timeout(settings.request_timeout_ms / 1000):
            return await _read(request, settings.max_body_bytes)
    except TimeoutError:
        message = f"body: within {settings.request_timeout_ms} ms"
        raise ApiError(408, message, code="request_timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "body: incomplete, the client closed the connection", code="incomplete_body") from None


def parse_json(data: bytes) -> Any:  # noqa: ANN401 - JSON
    """Return the JSON value of a body; raises an ApiError if it is malformed."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"body: JSON in UTF-8, got an error: {error}", code="invalid_json") from None


async def _read(request: Request, most: int) -> bytes:
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 20 else 0  # noqa: PLR2004
    if size > _MAX_DISCARDED_BYTES:
        raise _too_large(most, size)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= most:
            chunks.append(chunk)
        elif size > _MAX_DISCARDED_BYTES:
            raise _too_large(most, size)
    if size > most:
        raise _too_large(most, size)
    return b"".join(chunks)


def _too_large(most: int, size: int) -> ApiError:
    return ApiError(413, f"body: at most {most} bytes, got {size} or more", code="request_too_large")


class RequestTypes:
    """The type of each route's body, with the bounds that the settings give."""

    def __init__(self, settings: Settings) -> None:
        """Define the types."""
        gateway, limits = settings.gateway, settings.limits
        text = _text(1, _MAX_CHARACTERS)
        self._text = text
        self._texts = _list(text, 1, gateway.max_choices)
        self._ids = _list(_integer(0, limits.max_token_id), 1, gateway.max_prompt_tokens)
        self._id_lists = _list(self._ids, 1, gateway.max_choices)
        prompts = [msgspec.json.schema(kind) for kind in (text, self._texts, self._ids, self._id_lists)]
        tokens, alternatives = _integer(1, gateway.max_tokens), _integer(0, limits.max_top_k)
        stop, name = _text(1, _MAX_STOP_CHARACTERS), _text(0, _MAX_NAME_CHARACTERS)
        sampling = (
            _optional(
                "temperature",
                Annotated[float, Meta(ge=0, le=_MAX_TEMPERATURE)],
                "The divisor of the logits; 0: always the most probable token.",
            ),
            _optional("top_p", Annotated[float, Meta(gt=0, le=1)], "The probability mass that is kept."),
            _optional("stop", stop | _list(stop, 0, _MAX_STOPS), "Texts that end the answer, and are cut off."),
            _optional(
                "seed",
                _integer(-(2**63), 2**63 - 1),
                "Makes sampling repeatable; choice number i of an answer uses seed + i.",
            ),
        )
        options = _define("StreamOptions", _optional("include_usage", bool, "Whether a last chunk has the usage."))
        common = (
            _required("model", name, "One of those that /v1/models lists."),
            *sampling,
            _optional("n", _integer(1, gateway.max_choices), "How many choices each prompt has.", 1),
            _optional("stream", bool, "Whether the answer is sent as server-sent events.", default=False),
            _optional("stream_options", options, "Only where stream is true."),
            _optional("include_draft_logprobs", bool, "Adds draft_logprobs beside logprobs.", default=False),
            _optional("return_token_ids", bool, "Adds token_ids and prompt_token_ids.", default=False),
            _optional("return_columns", bool, "Sends logprobs as base64 columns instead.", default=False),
            _optional("ignore_eos", bool, "Generates past the model's own end of text.", default=False),
            _optional("user", name, "Accepted and ignored."),
            *self._choosing(gateway, limits),
            *_forms(name),
            _not_offered("skip_special_tokens"),
        )
        part = _define(
            "ContentPart",
            _required("type", Literal[_ENUMS["type"]], "The kind of part."),
            _required("text", _text(0, _MAX_CHARACTERS), "The text."),
        )
        message = _define(
            "Message",
            _required("role", Literal[_ENUMS["role"]], "Who wrote the message."),
            _required("content", _text(0, _MAX_CHARACTERS) | _list(part, 1, _MAX_PARTS), "The text, or its parts."),
            _optional("name", name, "Accepted and ignored."),
            # OpenAI's own client sends an answer back with these fields, all null.
            *(
                _optional(each, None, "Not offered: only null is accepted.")
                for each in ("refusal", "annotations", "audio", "function_call", "tool_calls")
            ),
        )
        self.completion = _define(
            "Completion",
            *common,
            (
                "prompt",
                # msgspec has no unions of lists: `read` checks the prompt by the type of its first element.
                Annotated[Any, _described("A text, token ids, or several of either.", anyOf=prompts)],
            ),
            _optional("max_tokens", tokens, "The most tokens of a choice.", COMPLETION_TOKENS),
            _optional("logprobs", alternatives, "How many alternatives a token has; 0: only its own logprob."),
            *map(_not_offered, ("echo", "best_of", "suffix")),
        )
        self.chat = _define(
            "Chat",
            *common,
            _required("messages", _list(message, 1, _MAX_MESSAGES), "The chat so far."),
            _optional("max_completion_tokens", tokens, "The most tokens of a choice; absent: as many as fit."),
            _optional("max_tokens", tokens, "The older name of max_completion_tokens."),
            _optional("logprobs", bool, "Whether tokens have their logprobs.", default=False),
            _optional("top_logprobs", alternatives, "How many alternatives each token has; only with logprobs."),
            *map(_not_offered, ("tools", "store")),
        )
        self.inspection = _define(
            "Inspection",
            _required("prompt", text, "The text to continue."),
            *sampling,
            _optional("max_tokens", tokens, "The most tokens.", _INSPECTED_TOKENS),
            _optional("top_logprobs", alternatives, "How many alternatives each token has.", 10),
            _optional("drafts", bool, "Whether rows have what the draft model proposed.", default=True),
        )

        self.tokenization = _define(
            "Tokenization",
            _optional("model", name, "One of those that /v1/models lists."),
            _optional("prompt", text, "The text; either this or messages."),
            _optional("messages", _list(message, 1, _MAX_MESSAGES), "The chat; either this or prompt."),
            _optional("add_special_tokens", bool, "Whether a text gets the tokens that the model wants around it."),
            _optional("add_generation_prompt", bool, "Whether a chat ends where the assistant begins.", default=True),
            _optional("return_token_strs", bool, "Adds token_strs: the text of each token.", default=False),
        )
        self.detokenization = _define(
            "Detokenization",
            _optional("model", name, "One of those that /v1/models lists."),
            _required("tokens", self._ids, "The token ids."),
        )

    def read(self, kind: type[Struct], value: Any) -> Any:  # noqa: ANN401 - JSON, and one of the types above
        """Return a body as one of the types; raises an ApiError that names the field, the limit and the value.

        A completion's prompt is returned as a list of prompts.
        """
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
        token_id, word = _integer(0, limits.max_token_id), _text(1, _MAX_STOP_CHARACTERS)
        self._token_id = token_id
        penalty = Annotated[float, Meta(ge=-2, le=2)]
        repetition = Annotated[float, Meta(gt=0, le=_MAX_REPETITION_PENALTY)]
        biases = _described(
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
        stop_ids = _list(token_id, 0, _MAX_STOP_TOKENS)
        return [
            _optional("top_k", _integer(-1, 2**31 - 1), "How many of the most probable tokens are kept; -1 or 0: all."),
            _optional("min_p", Annotated[float, Meta(ge=0, le=1)], "The least share of the top probability kept."),
            _optional("presence_penalty", penalty, "What tokens lose that the output has already."),
            _optional("frequency_penalty", penalty, "What tokens lose each time that the output has them."),
            _optional("repetition_penalty", repetition, "What divides the logits of tokens that were there already."),
            ("logit_bias", Annotated[Any, biases], None),
            _optional("min_tokens", _integer(0, gateway.max_tokens), "The least tokens before a stop ends a choice."),
            _optional("stop_token_ids", stop_ids, "Tokens that end the answer, whose text is cut off."),
            _optional(
                "include_stop_str_in_output", bool, "Whether the stop that ends an answer is in it.", default=False
            ),
            _optional("bad_words", _list(word, 0, _MAX_BAD_WORDS), "Texts that are not generated."),
            _optional("allowed_token_ids", _list(token_id, 1, _MAX_ALLOWED_TOKENS), "The only tokens to choose from."),
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


def _forms(name: Any) -> list[Any]:  # noqa: ANN401 - a type
    """Return the fields of an output's form, and of how the engine treats a request."""
    form = _text(1, _MAX_FORM_CHARACTERS)
    structured = _define(
        "StructuredOutputs",
        _optional("json", form | dict[str, Any], "A JSON Schema, as an object or its text."),
        _optional("json_object", bool, "Whether the output is any JSON object."),
        _optional("regex", _text(1, _MAX_PATTERN_CHARACTERS), "A regular expression that matches the output."),
        _optional("choice", _list(_text(1, _MAX_NAME_CHARACTERS), 1, _MAX_CHOICE_TEXTS), "The texts to choose from."),
        _optional("grammar", form, "A grammar, as the engine reads it."),
    )
    json_schema = _define(
        "ResponseSchema",
        _required("name", name, "Its name, which is ignored."),
        _optional("description", form, "Accepted and ignored."),
        _optional("schema", dict[str, Any], "The JSON Schema."),
        _optional("strict", bool, "Accepted and ignored: the schema always holds."),
    )
    response = _define(
        "ResponseFormat",
        _required("type", Literal[_ENUMS["response_format.type"]], "The form of the answer."),
        _optional("json_schema", json_schema, "The JSON Schema, where the type is json_schema."),
    )
    return [
        _optional("response_format", response, "The form that the answer has."),
        _optional("structured_outputs", structured, "The same, with more forms: one of them."),
        _optional("priority", _integer(-(2**63), 2**63 - 1), "Which requests come first: the lowest; absent: 0."),
        _optional("cache_salt", _text(1, _MAX_STOP_CHARACTERS), "Prompts' states are shared within one salt alone."),
    ]


def structured_output(body: Any) -> dict[str, Any] | None:  # noqa: ANN401 - a struct
    """Return the contract's StructuredOutput that a body asks for; None: it asks for none. Raises an ApiError."""
    wanted, response = body.structured_outputs, body.response_format
    found = None
    if wanted is not None:
        given = {name: value for name in wanted.__struct_fields__ if (value := getattr(wanted, name)) is not None}
        if len(given) != 1 or given.get("json_object") is False:
            names = ", ".join(f"{name}: False" if value is False else name for name, value in given.items())
            raise invalid("structured_outputs", f"one of {', '.join(wanted.__struct_fields__)}, got {names or 'none'}")
        ((form, value),) = given.items()
        found = _form(f"structured_outputs.{form}", form, value)
    if response is None or response.type == "text":
        if response is not None and response.json_schema is not None:
            raise invalid("response_format.json_schema", "only where the type is json_schema, got it with text")
        return found
    if found is not None:
        raise invalid("response_format", f"none beside structured_outputs, got {response.type}")
    where = "response_format.json_schema"
    if response.type == "json_object":
        if response.json_schema is not None:
            raise invalid(where, "only where the type is json_schema, got it with json_object")
        return {"json_object": {}}
    if response.json_schema is None or response.json_schema.schema is None:
        missing = where if response.json_schema is None else f"{where}.schema"
        raise invalid(missing, "required where the type is json_schema, got nothing")
    return _form(f"{where}.schema", "json", response.json_schema.schema)


def _form(where: str, form: str, value: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    if form == "choice":
        return {"choice": {"texts": value}}
    if form == "json_object":
        return {"json_object": {}}
    try:
        text = value if isinstance(value, str) else orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:  # it is nested too deeply
        raise invalid(where, f"JSON, got an error: {error}") from None
    size = len(text.encode())
    if size > _MAX_FORM_BYTES:
        raise invalid(where, f"at most {_MAX_FORM_BYTES} bytes, got {size}")
    if form != "json":
        return {form: {"pattern" if form == "regex" else "text": text}}
    if value is text:
        try:
            orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise invalid(where, f"JSON, got an error: {error}") from None
    return {"json_schema": {"schema": text}}


def invalid(name: str, what: str) -> ApiError:
    """Return the error of a field whose value is not accepted."""
    return ApiError(400, f"{name or 'the body'}: {what}", param=name or None, code="invalid_value")


def _integer(low: int, high: int) -> Any:  # noqa: ANN401 - a type, as below
    return Annotated[int, Meta(ge=low, le=high)]


def _text(low: int, high: int) -> Any:  # noqa: ANN401
    return Annotated[str, Meta(min_length=low, max_length=high)]


def _list(kind: Any, low: int, high: int) -> Any:  # noqa: ANN401
    return Annotated[list[kind], Meta(min_length=low, max_length=high)]


def _define(name: str, *fields: Any) -> Any:  # noqa: ANN401
    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)


def _required(name: str, kind: Any, meaning: str) -> tuple[str, Any]:  # noqa: ANN401
    return name, Annotated[kind, Meta(description=meaning)]


def _optional(name: str, kind: Any, meaning: str, default: Any = None) -> tuple[str, Any, Any]:  # noqa: ANN401
    return name, Annotated[kind | None if kind is not None else None, Meta(description=meaning)], default


def _not_offered(name: str) -> tuple[str, Any, None]:
    meta = _described(f"Not offered: only {_NOT_OFFERED[name]!r} is accepted.", enum=[_NOT_OFFERED[name], None])
    return name, Annotated[Any, meta], None


def _described(meaning: str, **schema: Any) -> Meta:  # noqa: ANN401
    return Meta(description=meaning, extra_json_schema=schema)


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
        limit, path = (limit, path[:-1]) if found else (path, "")
    for name, index in _STEP.findall(path):
        value = value[name] if name else value[int(index)]
    where = (where + path).removeprefix(".")
    member = _MEMBER.fullmatch(limit)
    if member is not None:
        is_missing, name = member[1] == "missing required", member[2]
        where = f"{where}.{name}".removeprefix(".")
        raise invalid(where, "required, got nothing" if is_missing else f"no such field, got {shown(value[name])}")
    if limit.startswith("Invalid enum value"):
        limit = "one of " + ", ".join(map(repr, _ENUMS.get(where, _ENUMS.get(where.rpartition(".")[2], ()))))
    got = f"a length of {len(value)}" if " of length " in limit else shown(value)
    raise invalid(where, f"{limit.partition(', got ')[0].replace('`', '').replace('Expected', 'expected')}, got {got}")
