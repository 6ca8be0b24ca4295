"""Function calls in answers: CallWriter for outputs that must be calls, AutoCallWriter for other outputs."""

import json
import re
import secrets
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import orjson

from tokenbus.gateway.output_form import AutoCalls, ForcedCall
from tokenbus.gateway.tool_parsers import PARSERS, Call, Nesting, written

_CALL = re.compile(r'[\[,]\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*(?=\S)')
"""The beginning of a call in the list that `tool_choice: required` forces."""


class CallDelta(NamedTuple):
    """A part of a call in a stream."""

    number: int
    name: str | None
    """The function's name in the first part of a call, or else None."""
    arguments: str


class _Writer(ABC):
    held = 0
    is_called = False
    """Whether the output has calls, which makes the finish reason `tool_calls` instead of `stop`."""

    @abstractmethod
    def take(self, text: str, *, is_last: bool) -> tuple[str, list[CallDelta]]:
        """Add the next text of a stream. Return the content and the calls that are now certain."""

    def delta(self, text: str, *, is_last: bool = False) -> bytes:
        """Add the next text of a stream. Return the `delta` of its event, or an empty object if nothing is certain."""
        content, calls = self.take(text, is_last=is_last)
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = [_delta(each) for each in calls]
        return orjson.dumps(delta)


class CallWriter(_Writer):
    """Writes the output of a choice that must be calls."""

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
        except (ValueError, KeyError, TypeError, RecursionError):  # RecursionError: too deeply nested
            return []


class AutoCallWriter(_Writer):
    """Writes the text of a choice, and the calls that a parser finds in the text."""

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
        # As in vLLM, if there are calls, content of only spaces becomes null.
        return {"content": content if content.strip() else None, "tool_calls": [_call(*call) for call in calls]}

    def _take(self, text: str, *, is_last: bool) -> tuple[str, list[Call]]:
        content, calls = self._parser.add(text, is_last=is_last)
        if self._is_one:
            calls = calls[: 1 - self._count]
        self._count += len(calls)
        self.is_called = self._count > 0
        return content, calls


class _CallScanner:
    """Finds the calls in the arriving text of a list of objects with `name` and `parameters`."""

    def __init__(self) -> None:
        self._held = ""
        self._number = -1
        self._arguments: Nesting | None = None
        """The scanner of the current call's arguments, or None between calls."""

    def add(self, text: str) -> list[CallDelta]:
        pieces = []
        rest, name = self._held + text, None
        self._held = ""
        while rest:
            if self._arguments is None:
                begin = _CALL.search(rest)
                if begin is None:
                    self._held = rest
                    break
                self._number += 1
                self._arguments = Nesting()
                name, rest = json.loads(begin[1]), rest[begin.end() :]
            end = self._arguments.end(rest)
            if end != 0 or name is not None:
                pieces.append(CallDelta(self._number, name, rest[:end]))
            if end is None:
                break
            rest, name, self._arguments = rest[end:], None, None
        return pieces


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
