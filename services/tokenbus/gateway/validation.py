"""Checks of the types, the depth and the size of JSON from clients, with errors that name the field."""

import re
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import orjson

from tokenbus.gateway.errors import ApiError
from tokenbus.settings.errors import shown

MOST_SESSION_BYTES = 128
"""The contract's bound of a session's label, in bytes."""
_MAX_DEPTH = 128
"""Maximum depth of lists and objects in a field, far below the limits of JSON libraries."""
_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)
"""A JSON string, whose end may be missing, or a bracket."""
_MISSING = re.compile(r"Object missing required field `(.*)`")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


def invalid(name: str, what: str) -> ApiError:
    return ApiError(400, f"{name or 'the body'}: {what}", param=name or None, code="invalid_value")


def check(holds: object, name: str, limit: str, value: object) -> None:
    """Unless `holds`, raise an ApiError that names the field, the limit and the value."""
    if not holds:
        raise invalid(name, f"{limit}, got {shown(value)}")


def checked_session(name: str, label: str) -> str:
    """Return a valid session label. Raises an ApiError that names the field, the limit and the value."""
    size = len(label.encode("utf-8", "surrogateescape"))
    if size > MOST_SESSION_BYTES:
        raise invalid(name, f"at most {MOST_SESSION_BYTES} bytes, got {size}: {shown(label)}")
    check(label.isprintable(), name, "printable text", label)
    return label


def converted(value: Any, kind: Any, where: str = "") -> Any:  # noqa: ANN401
    """Convert a value to a type. Raises an ApiError that names the field within `where`, the limit and the value."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        # msgspec's message, such as "Expected `int` <= 5 - at `$.stop[1]`", has the limit and the path.
        limit, found, path = str(error).rpartition(" - at `$")
        # The path ends with `[...]` if an object may have members of any name.
        limit, path = (limit, path[:-1].partition("[...]")[0]) if found else (path, "")
    for name, index in _STEP.findall(path):
        value = value[name] if name else value[int(index)]
    where = (where + path).removeprefix(".")
    missing = _MISSING.fullmatch(limit)
    if missing is not None:
        raise invalid(f"{where}.{missing[1]}".removeprefix("."), "required, got nothing")
    if limit.startswith(("Invalid enum value", "Invalid value")):  # msgspec says "Invalid value" for tags of unions
        limit = "one of " + ", ".join(map(repr, dict.fromkeys(_texts(kind, _STEP.findall(path)))))
    got = f"a length of {len(value)}" if " of length " in limit else shown(value)
    raise invalid(where, f"{limit.partition(', got ')[0].replace('`', '').replace('Expected', 'expected')}, got {got}")


def _texts(kind: Any, steps: list[tuple[str, str]]) -> Iterator[str]:  # noqa: ANN401
    if get_origin(kind) in {Union, UnionType}:
        for each in get_args(kind):
            yield from _texts(each, steps)
    elif get_origin(kind) is Literal and not steps:
        yield from get_args(kind)
    elif get_origin(kind) is list and steps:
        yield from _texts(get_args(kind)[0], steps[1:])
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct) and steps:
        name, tag = steps[0][0], kind.__struct_config__
        yield from [str(tag.tag)] if tag.tag_field == name else _texts(get_type_hints(kind).get(name), steps[1:])


def parse_json(data: bytes | bytearray) -> Any:  # noqa: ANN401 - JSON
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if str(error).startswith("depth limit"):
            check_depth("", _written_depth(data))
        raise ApiError(400, f"body: JSON in UTF-8, got an error: {error}", code="invalid_json") from None


def check_json(where: str, text: str) -> None:
    check_depth(where, _written_depth(text.encode()))
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise invalid(where, f"JSON, got an error: {error}") from None


def depth_of(value: object) -> int:
    """Return the depth of nested lists and objects in a value. Other values have depth 0."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, list | dict)]:
        depth += 1
        level = [member for each in level for member in (each.values() if isinstance(each, dict) else each)]
    return depth


def check_depth(name: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise invalid(shown(name)[1:-1] if name else "", f"nested at most {_MAX_DEPTH} deep, got {depth}")


def json_text(where: str, value: object, most: int) -> str:
    """Return the value of a field as JSON of at most `most` bytes. Raises an ApiError."""
    data = orjson.dumps(value)
    if len(data) > most:
        raise invalid(where, f"at most {most} bytes, got {len(data)}")
    return data.decode()


def _written_depth(data: bytes | bytearray) -> int:
    depth = deepest = 0
    for found in _BRACKET.finditer(data):
        depth += (found[0] in b"[{") - (found[0] in b"]}")
        deepest = max(deepest, depth)
    return deepest
