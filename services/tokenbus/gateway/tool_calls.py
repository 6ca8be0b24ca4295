"""Function calls in answers: CallWriter writes an output that is forced to be calls, and AutoCallWriter any text."""

import json
import re
import secrets
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import orjson

from tokenbus.gateway.output_form import AutoCalls, ForcedCall
from tokenbus.gateway.tool_parsers import PARSERS, Call, written

_CALL = re.compile(r'[\[,]\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*(?=\S)')
"""The beginning of an element of the list that `required` forces as the output."""
_OPENING, _CLOSING = "{[", "}]"


class CallDelta(NamedTuple):
    """A piece of a call in a stream."""

    number: int
    name: str | None
    """The function, in the first piece of a call."""
    arguments: str


class _Writer(ABC):
    held = 0
    is_called = False
    """Whether there are calls, so that the finish reason is `tool_calls` instead of `stop`."""

    @abstractmethod
    def take(self, text: str, *, is_last: bool) -> tuple[str, list[CallDelta]]:
        """Return the content and the calls that are certain with a stream's next text."""

    def delta(self, text: str, *, is_last: bool = False) -> bytes:
        """Return a stream's next `delta`; an empty object if the text brings nothing new."""
        content, calls = self.take(text, is_last=is_last)
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = [_delta(each) for each in calls]
        return orjson.dumps(delta)


class CallWriter(_Writer):
    """Writes a choice's output, which is forced to be calls."""

    def __init__(self, forced: ForcedCall) -> None:
        self.is_called = forced.name is None
        self._name = forced.name
        self._has_begun = False
        self._calls = _CallScanner()

    def take(self, text: str, *, is_last: bool) -> tuple[str, list[CallDelta]]:  # noqa: ARG002 - as AutoCallWriter's
        if self._name is None:
            return "", self._calls.add(text)
        calls = [CallDelta(0, None if self._has_begun else self._name, text)] if text or not self._has_begun else []
        self._has_begun = True
        return "", calls

    def message(self, text: str) -> dict[str, Any]:
        calls = self._calls_in(text)
        return {"content": "", "tool_calls": calls} if calls else {"content": ""}

    def _calls_in(self, text: str) -> list[dict[str, Any]]:
        if self._name is not None:
            return [_call(self._name, text)] if text.strip() else []
        try:
            return [_call(each["name"], written(each["parameters"])) for each in json.loads(text)]
        except (ValueError, KeyError, TypeError, RecursionError):  # the last error: nested too deeply for Python
            return []


class AutoCallWriter(_Writer):
    """Writes a choice's text, and the calls that a parser finds in it."""

    def __init__(self, auto: AutoCalls) -> None:
        self._parser = PARSERS[auto.parser]()
        self._is_one = auto.is_one
        self._count = 0

    @property
    def held(self) -> int:  # type: ignore[override]
        return self._parser.held

    def take(self, text: str, *, is_last: bool) -> tuple[str, list[CallDelta]]:
        content, calls = self._take(text, is_last=is_last)
        begin = self._count - len(calls)
        return content, [CallDelta(begin + number, *call) for number, call in enumerate(calls)]

    def message(self, text: str) -> dict[str, Any]:
        content, calls = self._take(text, is_last=True)
        if not calls:
            return {"content": content}
        # As in vLLM, content that is only spaces becomes null if there are calls.
        return {"content": content if content.strip() else None, "tool_calls": [_call(*call) for call in calls]}

    def _take(self, text: str, *, is_last: bool) -> tuple[str, list[Call]]:
        content, calls = self._parser.add(text, is_last=is_last)
        if self._is_one:
            calls = calls[: 1 - self._count]
        self._count += len(calls)
        self.is_called = self._count > 0
        return content, calls


class _CallScanner:
    """Finds the calls in a list of objects with `name` and `parameters`, as its text arrives."""

    def __init__(self) -> None:
        self._held = ""
        self._number = -1
        self._is_inside = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def add(self, text: str) -> list[CallDelta]:
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
                pieces.append(CallDelta(self._number, name, rest[:size]))
            rest, name = rest[size:], None
            if self._is_inside:
                break
        self._held = "" if self._is_inside else rest
        return pieces

    def _size(self, text: str) -> int:
        for index, character in enumerate(text):
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
                is_last = not self._in_string and not self._depth
            else:
                if not self._depth and (character in ",}]" or character.isspace()):  # after a number or a constant
                    self._is_inside = False
                    return index
                self._in_string = character == '"'
                self._depth += (character in _OPENING) - (character in _CLOSING)
                is_last = not self._depth and character in _CLOSING
            if is_last:
                self._is_inside = False
                return index + 1
        return len(text)


def call_writer(forced: ForcedCall | None, auto: AutoCalls | None) -> CallWriter | AutoCallWriter | None:
    if forced is not None:
        return CallWriter(forced)
    return None if auto is None else AutoCallWriter(auto)


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": _new_id(), "type": "function", "function": {"name": name, "arguments": arguments}}


def _delta(call: CallDelta) -> dict[str, Any]:
    if call.name is not None:
        return {"index": call.number, **_call(call.name, call.arguments)}
    return {"index": call.number, "function": {"arguments": call.arguments}}


def _new_id() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(16)}"
