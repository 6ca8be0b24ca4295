"""MessagesFormat: answers and errors of Anthropic's /v1/messages."""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import orjson

from tokenbus.gateway.answer import Beside, Choice, Format
from tokenbus.gateway.completion_request import CompletionRequest, Ending
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.event_writer import EventForm, EventStream
from tokenbus.gateway.logprob_writers import Piece, Written
from tokenbus.gateway.native import Form
from tokenbus.gateway.sse import event
from tokenbus.gateway.tool_calls import call_writer

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error types by status. Other statuses have the type `api_error` or `invalid_request_error`."""
_SERVER_ERROR = 500
_TEXT = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)
_BEHIND_TEXT = b"}}\n\n"


def message_error(error: ApiError) -> dict[str, Any]:
    other = "api_error" if error.status >= _SERVER_ERROR else "invalid_request_error"
    return {"type": "error", "error": {"type": _ERRORS.get(error.status, other), "message": error.message}}


class MessagesFormat(Format):
    """Writes one answer of /v1/messages."""

    def __init__(self, request: CompletionRequest, request_id: int) -> None:
        self._request = request
        self._head = {"id": f"msg_{request_id:016x}", "type": "message", "role": "assistant", "model": request.model}
        self._calls = call_writer(request.forced, request.auto)
        self._block = -1
        self._kind = ""
        self._has_calls = False

    def stream(self, index: int) -> EventStream:  # noqa: ARG002 - there is one choice
        request = self._request
        if not request.is_streamed or self._calls is not None or request.stopping.texts:
            return EventStream()
        return EventStream(EventForm(_TEXT, _BEHIND_TEXT, b"", Form.NONE, has_ids=False))

    def beginnings(self) -> bytes:
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            **_ending(None, has_calls=False),
            "usage": self._usage(0),
        }
        begin = _event("message_start", message=message)
        return begin + self._begin_block("text", text="") if self._calls is None else begin

    def chunk(self, choice: Choice, text: str, pieces: Sequence[Piece]) -> bytes:  # noqa: ARG002
        writer, events = self._calls, []
        content, calls = (text, []) if writer is None else writer.take(text, is_last=choice.ending is not None)
        if content:
            if self._kind != "text":
                events.append(self._begin_block("text", text=""))
            events.append(self._delta(type="text_delta", text=content))
        for call in calls:
            if call.name is not None:
                self._has_calls = True
                events.append(self._begin_block("tool_use", id=_new_id(), name=call.name, input={}))
            events.append(self._delta(type="input_json_delta", partial_json=call.arguments))
        if choice.ending is not None:
            ending = _ending(choice.ending, has_calls=self._has_calls)
            usage = self._usage(choice.tokens, choice.cached_tokens)
            events += [self._end_block(), _event("message_delta", delta=ending, usage=usage), _event("message_stop")]
        return b"".join(events)

    def error(self, error: ApiError) -> bytes:
        return _event("error", **message_error(error))

    def choice(self, index: int, text: str, beside: Beside, end: Ending | None) -> Iterator[Written]:  # noqa: ARG002
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        if self._calls is not None:
            message = self._calls.message(text)
            calls = list(_tool_uses(message.get("tool_calls", ())))
            content = [{"type": "text", "text": message["content"]}] * bool(message["content"]) + calls
        members = {"content": content, **_ending(end, has_calls=any("input" in each for each in content))}
        yield orjson.dumps(members)[1:-1]

    def whole(self, choices: Iterable[Iterable[Written]], tokens: int, cached: int | None) -> Iterator[Written]:
        yield orjson.dumps(self._head)[:-1] + b","
        for choice in choices:
            yield from choice
        yield b"," + orjson.dumps({"usage": self._usage(tokens, cached)})[1:]

    def _usage(self, tokens: int, cached: int | None = None) -> dict[str, int]:
        """Return the token counts. Anthropic's `input_tokens` excludes cached tokens."""
        prompt = self._request.prompt_tokens
        if cached is None:
            return {"input_tokens": prompt, "output_tokens": tokens}
        return {"input_tokens": prompt - cached, "cache_read_input_tokens": cached, "output_tokens": tokens}

    def _begin_block(self, kind: str, **members: object) -> bytes:
        ended = self._end_block()
        self._block += 1
        self._kind = kind
        return ended + _event("content_block_start", index=self._block, content_block={"type": kind, **members})

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._block, delta=delta)

    def _end_block(self) -> bytes:
        return _event("content_block_stop", index=self._block) if self._block >= 0 else b""


def _event(name: str, /, **members: Any) -> bytes:  # noqa: ANN401 - JSON
    return event(name, {"type": name, **members})


def _ending(end: Ending | None, *, has_calls: bool) -> dict[str, str | None]:
    reason, stop, *_ = end or (None, None)
    if reason in ("length", "abort"):
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if reason is None or has_calls:
        return {"stop_reason": reason and "tool_use", "stop_sequence": None}
    if isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _tool_uses(calls: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        with suppress(ValueError):  # the answer ended before the end of the arguments
            yield {"type": "tool_use", "id": _new_id(), "name": name, "input": orjson.loads(arguments)}


def _new_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"
