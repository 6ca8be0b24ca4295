"""The words in which the types of request bodies are written: fields with their bounds and meanings."""

import re
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta

from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.settings.errors import shown

MAX_CHARACTERS = 4_194_304
MAX_NAME_CHARACTERS = 256
_MAX_DEPTH = 128
"""Of lists and objects in a field: far below what any library that reads them bears."""
_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)
"""A text, whose end may be missing, or where a list or an object begins or ends."""
_ENUMS = {
    "messages.role": ("system", "developer", "user", "assistant", "tool"),
    "messages.content.type": ("text",),
    "messages.tool_calls.type": ("function",),
    "tools.type": ("function",),
    "tool_choice": ("none", "auto", "required"),
    "tool_choice.type": ("function",),
    "response_format.type": ("text", "json_object", "json_schema"),
}
"""By the place of a field, without places in lists, the texts that it may have."""


def one_of(place: str) -> Any:  # noqa: ANN401 - a type, as below
    """Return the type of a field that has one of a few texts."""
    return Literal[_ENUMS[place]]


def choices(place: str) -> str:
    """Return what a field may be, in words."""
    return "one of " + ", ".join(map(repr, _ENUMS[place]))


def integer(low: int, high: int) -> Any:  # noqa: ANN401
    """Return the type of an integer from `low` to `high`."""
    return Annotated[int, Meta(ge=low, le=high)]


def string(low: int, high: int) -> Any:  # noqa: ANN401
    """Return the type of a text of `low` to `high` characters."""
    return Annotated[str, Meta(min_length=low, max_length=high)]


def array(kind: Any, low: int, high: int) -> Any:  # noqa: ANN401
    """Return the type of a list of `low` to `high` elements."""
    return Annotated[list[kind], Meta(min_length=low, max_length=high)]


def struct(name: str, *fields: Any) -> Any:  # noqa: ANN401
    """Return the type of an object that has these fields and no others."""
    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)


def required(name: str, kind: Any, meaning: str) -> tuple[str, Any]:  # noqa: ANN401
    """Return a field that must be there."""
    return name, Annotated[kind, Meta(description=meaning)]


def optional(name: str, kind: Any, meaning: str, default: Any = None) -> tuple[str, Any, Any]:  # noqa: ANN401
    """Return a field that may be absent or null."""
    return name, Annotated[kind | None if kind is not None else None, Meta(description=meaning)], default


def described(meaning: str, **schema: Any) -> Meta:  # noqa: ANN401
    """Return what the document says of a field that has no type of its own."""
    return Meta(description=meaning, extra_json_schema=schema)


def invalid(name: str, what: str) -> ApiError:
    """Return the error of a field whose value is not accepted."""
    return ApiError(400, f"{name or 'the body'}: {what}", param=name or None, code="invalid_value")


def depth_of(value: object) -> int:
    """Return how deep lists and objects are nested in a value; 0: it is neither."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, list | dict)]:
        depth += 1
        level = [member for each in level for member in (each.values() if isinstance(each, dict) else each)]
    return depth


def written_depth(data: bytes | bytearray) -> int:
    """Return how deep lists and objects are nested in JSON that no parser takes."""
    depth = deepest = 0
    for found in _BRACKET.finditer(data):
        depth += (found[0] in b"[{") - (found[0] in b"]}")
        deepest = max(deepest, depth)
    return deepest


def check_depth(name: str, depth: int) -> None:
    """Raise an ApiError for a field that is nested too deep."""
    if depth > _MAX_DEPTH:
        raise invalid(shown(name)[1:-1] if name else "", f"nested at most {_MAX_DEPTH} deep, got {depth}")


def json_text(where: str, value: object, most: int) -> str:
    """Return a field's value as JSON of at most so many bytes; raises an ApiError."""
    data = orjson.dumps(value)
    if len(data) > most:
        raise invalid(where, f"at most {most} bytes, got {len(data)}")
    return data.decode()
