"""Calls of functions in answers: CallWriter writes an output that was forced to be calls, AutoCallWriter any text."""

import json
import re
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from tokenbus.gateway.output_form import AutoCalls, ForcedCall
from tokenbus.gateway.tool_parsers import PARSERS, Call, written

if TYPE_CHECKING:
    from tokenbus.gateway.completion_request import CompletionRequest

_CALL = re.compile(r'[\[,]\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*(?=\S)')
"""The beginning of an element of the list that `required` makes the output."""
_OPENING, _CLOSING = "{[", "}]"


class CallWriter:
    """Writes a choice's output as calls, as its text comes, or at once."""

    held = 0

    def __init__(self, forced: ForcedCall) -> None:
        self.is_called = forced.name is None
        self._name = forced.name
        self._has_begun = False
        self._calls = _CallScanner()

    def delta(self, text: str, *, is_last: bool = False) -> bytes:
        """Return a stream's next `delta`, an empty object where the text brings nothing new."""
        _, pieces = self.take(text, is_last=is_last)
        return orjson.dumps({"tool_calls": [_delta(each) for each in pieces]} if pieces else {})

    def take(self, text: str, *, is_last: bool) -> "tuple[str, list[Piece]]":  # noqa: ARG002 - as AutoCallWriter's
        """Return what a stream's next text brings: no text, and parts of calls."""
        if self._name is None:
            return "", self._calls.add(text)
        pieces = [Piece(0, None if self._has_begun else self._name, text)] if text or not self._has_begun else []
        self._has_begun = True
        return "", pieces

    def message(self, text: str) -> dict[str, Any]:
        """Return a whole output's members of a message: no text, and `tool_calls`."""
        calls = self._calls_in(text)
        return {"content": "", "tool_calls": calls} if calls else {"content": ""}

    def _calls_in(self, text: str) -> list[dict[str, Any]]:
        """Return the calls of an output; none where it ended before it was complete."""
        if self._name is not None:
            return [_call(self._name, text)] if text.strip() else []
        try:
            return [_call(each["name"], written(each["parameters"])) for each in json.loads(text)]
        except (ValueError, KeyError, TypeError, RecursionError):  # the last: nested too deeply for Python
            return []


class AutoCallWriter:
    """Writes a choice's text, and the calls that a parser finds in it, as the text comes, or at once."""

    def __init__(self, auto: AutoCalls) -> None:
        self.is_called = False
        """Whether it has calls, so that its stop is one of `tool_calls`."""
        self._parser = PARSERS[auto.parser]()
        self._is_one = auto.is_one
        self._count = 0

    @property
    def held(self) -> int:
        """How many characters of a stream are held back."""
        return self._parser.held

    def delta(self, text: str, *, is_last: bool) -> bytes:
        """Return a stream's next `delta`, an empty object where nothing is certain."""
        content, pieces = self.take(text, is_last=is_last)
        delta: dict[str, Any] = {"content": content} if content else {}
        if pieces:
            delta["tool_calls"] = [_delta(each) for each in pieces]
        return orjson.dumps(delta)

    def take(self, text: str, *, is_last: bool) -> "tuple[str, list[Piece]]":
        """Return what is certain with a stream's next text: text, and calls, each in one part."""
        content, calls = self._take(text, is_last=is_last)
        begin = self._count - len(calls)
        return content, [Piece(begin + place, *call) for place, call in enumerate(calls)]

    def message(self, text: str) -> dict[str, Any]:
        """Return a whole output's members of a message: as vLLM has it, no text of spaces alone beside calls."""
        content, calls = self._take(text, is_last=True)
        if not calls:
            return {"content": content}
        return {"content": content if content.strip() else None, "tool_calls": [_call(*call) for call in calls]}

    def _take(self, text: str, *, is_last: bool) -> tuple[str, list[Call]]:
        """Return what is certain with a further text; of several calls the first, where there shall be one."""
        content, calls = self._parser.add(text)
        if is_last:
            rest = self._parser.end()
            content, calls = content + rest.content, calls + rest.calls
        if self._is_one:
            calls = calls[: 1 - self._count]
        self._count += len(calls)
        self.is_called = self._count > 0
        return content, calls


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


def call_writer(request: "CompletionRequest") -> CallWriter | AutoCallWriter | None:
    """Return what writes a choice's calls; None where none is looked for."""
    if request.forced is not None:
        return CallWriter(request.forced)
    return None if request.auto is None else AutoCallWriter(request.auto)


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": _new_id(), "type": "function", "function": {"name": name, "arguments": arguments}}


def _delta(piece: Piece) -> dict[str, Any]:
    if piece.name is not None:
        return {"index": piece.number, **_call(piece.name, piece.arguments)}
    return {"index": piece.number, "function": {"arguments": piece.arguments}}


def _new_id() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(16)}"
