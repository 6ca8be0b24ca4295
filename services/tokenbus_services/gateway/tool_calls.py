"""CallWriter: writes an output that was forced to be calls of functions as calls."""

import json
import re
import secrets
from typing import Any, NamedTuple

import orjson

from tokenbus_services.gateway.output_form import ForcedCall

_CALL = re.compile(r'[\[,]\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*(?=\S)')
"""The beginning of an element of the list that `required` makes the output."""
_OPENING, _CLOSING = "{[", "}]"


class CallWriter:
    """Writes a choice's output as calls, as its text comes, or at once."""

    def __init__(self, forced: ForcedCall) -> None:
        self._name = forced.name
        self._has_begun = False
        self._calls = _CallScanner()

    def delta(self, text: str) -> bytes:
        """Return a stream's next `delta`, an empty object where the text brings nothing new."""
        pieces = self.pieces(text)
        return orjson.dumps({"tool_calls": [_delta(each) for each in pieces]} if pieces else {})

    def pieces(self, text: str) -> "list[Piece]":
        """Return the parts of calls that a stream's next text brings."""
        if self._name is None:
            return self._calls.add(text)
        pieces = [Piece(0, None if self._has_begun else self._name, text)] if text or not self._has_begun else []
        self._has_begun = True
        return pieces

    def calls(self, text: str) -> list[dict[str, Any]]:
        """Return a whole output's `tool_calls`; none where it ended before it was complete."""
        if self._name is not None:
            return [_call(self._name, text)] if text.strip() else []
        try:
            found = json.loads(text)
            return [_call(each["name"], json.dumps(each["parameters"], ensure_ascii=False)) for each in found]
        except (ValueError, KeyError, TypeError):
            return []


class Piece(NamedTuple):
    """Part of a call."""

    number: int
    name: str | None
    """The function, where the call begins."""
    arguments: str


class _CallScanner:
    """Finds the calls in a list of objects with `name` and `parameters`, as its text comes."""

    def __init__(self) -> None:
        self._held = ""
        """Text in which no call has begun yet."""
        self._number = -1
        self._is_inside = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def add(self, text: str) -> list[Piece]:
        """Return the parts of calls that a further text brings."""
        pieces = []
        rest, name = self._held + text, None
        while rest:
            if not self._is_inside:
                begin = _CALL.search(rest)
                if begin is None:
                    break
                self._number += 1
                self._is_inside = True
                name, rest = json.loads(begin[1]), rest[begin.end() :]
            size = self._size(rest)
            if size or name is not None:
                pieces.append(Piece(self._number, name, rest[:size]))
            rest, name = rest[size:], None
            if self._is_inside:
                break
        self._held = "" if self._is_inside else rest
        return pieces

    def _size(self, text: str) -> int:
        """Return how much of a text belongs to the arguments that have begun."""
        for place, character in enumerate(text):
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
                is_last = not self._in_string and not self._depth
            else:
                if not self._depth and (character in ",}]" or character.isspace()):  # behind a number, or the like
                    self._is_inside = False
                    return place
                self._in_string = character == '"'
                self._depth += (character in _OPENING) - (character in _CLOSING)
                is_last = not self._depth and character in _CLOSING
            if is_last:
                self._is_inside = False
                return place + 1
        return len(text)


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": _new_id(), "type": "function", "function": {"name": name, "arguments": arguments}}


def _delta(piece: Piece) -> dict[str, Any]:
    if piece.name is not None:
        return {"index": piece.number, **_call(piece.name, piece.arguments)}
    return {"index": piece.number, "function": {"arguments": piece.arguments}}


def _new_id() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(16)}"
