"""ResponsesFormat: answers of OpenAI's /v1/responses."""

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from tokenbus.gateway.answer import Beside, Choice, Format
from tokenbus.gateway.completion_request import CompletionRequest, Ending
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.event_writer import EventStream
from tokenbus.gateway.logprob_writers import Entries, MemberWriter, Piece, Written
from tokenbus.gateway.sse import event
from tokenbus.gateway.tool_calls import call_writer

_TOO_MANY_REQUESTS = 429
_NO_LOGPROBS, _MARK = b"[]", b"\0"
_TEXT_BYTES = 60
_AGAIN = 4
"""Number of times that the last events repeat the text of an item."""


class ResponsesFormat(Format):
    """Writes one answer of /v1/responses. Python writes all events, because they are numbered."""

    def __init__(self, request: CompletionRequest, request_id: int) -> None:
        self.kept = 0
        self._request = request
        self._id = f"{request_id:016x}"
        self._created_at = int(time.time())
        self._calls = call_writer(request.forced, request.auto)
        self._numbered = 0
        self._items: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        self._texts: list[str] = []

    def writers(self, progress: EventStream) -> tuple[MemberWriter, ...]:  # noqa: ARG002
        return () if self._request.top_logprobs is None else (Entries(form=b"[%b]"),)

    def beginnings(self) -> bytes:
        response = self._response("in_progress", [])
        events = [self._event(f"response.{what}", response=response) for what in ("created", "in_progress")]
        if self._calls is None:
            events.append(self._begin_message())
        return b"".join(events)

    def chunk(self, choice: Choice, text: str, pieces: Sequence[Piece]) -> bytes:
        written = [each.joined(piece) for each, piece in zip(choice.writers, pieces, strict=True)]
        logprobs = written[0] if written else _NO_LOGPROBS
        writer, is_last = self._calls, choice.ending is not None
        content, calls = (text, []) if writer is None else writer.take(text, is_last=is_last)
        events = []
        is_message = self._item is not None and self._item["type"] == "message"
        if content and not is_message:
            events += [self._end_item("completed"), self._begin_message()]
        if content or (is_message and logprobs != _NO_LOGPROBS):
            members = {"content_index": 0, "logprobs": orjson.Fragment(logprobs)}
            events.append(self._delta("response.output_text.delta", content, **members))
        for call in calls:
            if call.name is not None:
                events += [self._end_item("completed"), self._begin_item(_call(call.name, "", "in_progress"))]
            events.append(self._delta("response.function_call_arguments.delta", call.arguments))
        if choice.ending is not None:
            status = _status(choice.ending)
            events.append(self._end_item(status))
            response = self._response(status, self._items, self._usage(choice.tokens, choice.cached_tokens))
            events.append(self._event(f"response.{status}", response=response))
        return b"".join(events)

    def error(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == _TOO_MANY_REQUESTS else "server_error"
        response = self._response("failed", self._items) | {"error": {"code": code, "message": error.message}}
        return self._event("response.failed", response=response)

    def choice(self, index: int, text: str, beside: Beside, end: Ending | None) -> Iterator[Written]:  # noqa: ARG002
        status, calls = _status(end), []
        if self._calls is not None:
            message = self._calls.message(text)
            text = message["content"]
            calls = [call["function"] for call in message.get("tool_calls", ())]
        # Write a placeholder that cannot occur in JSON, which the logprobs replace later.
        part = _text(text, _MARK if beside else _NO_LOGPROBS)
        output = [self._message(status, [part])] * (self._calls is None or bool(text))
        output += [_call(each["name"], each["arguments"], status) for each in calls]
        before, mark, behind = orjson.dumps(self._response(status, output))[:-1].partition(_MARK)
        yield before
        for _, logprobs in beside if mark else ():
            yield from logprobs
        yield behind

    def whole(self, choices: Iterable[Iterable[Written]], tokens: int, cached: int | None) -> Iterator[Written]:
        for choice in choices:
            yield from choice
        yield b',"usage":%b}' % orjson.dumps(self._usage(tokens, cached))

    def _response(self, status: str, output: list[dict[str, Any]], usage: object = None) -> dict[str, Any]:
        is_cut = status == "incomplete"
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created_at,
            "model": self._request.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": output,
            "background": False,
            "previous_response_id": None,
            "store": False,
            **self._request.echoed,
            **({} if usage is None else {"usage": usage}),
        }

    def _usage(self, tokens: int, cached: int | None) -> dict[str, Any]:
        prompt = self._request.prompt_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached or 0, "cache_write_tokens": 0},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + tokens,
        }

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        number = f"_{len(self._items)}" if self._items else ""
        return {
            "id": f"msg_{self._id}{number}",
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _begin_message(self) -> bytes:
        begun = self._begin_item(self._message("in_progress", []))
        added = {**self._position(), "content_index": 0, "part": _text("")}
        return begun + self._event("response.content_part.added", **added)

    def _begin_item(self, item: dict[str, Any]) -> bytes:
        self._item, self._texts = item, []
        return self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _end_item(self, status: str) -> bytes:
        item, text = self._item, "".join(self._texts)
        if item is None:
            return b""
        position = self._position()
        if item["type"] == "message":
            part = _text(text)
            events = [
                self._event("response.output_text.done", **position, content_index=0, text=text, logprobs=[]),
                self._event("response.content_part.done", **position, content_index=0, part=part),
            ]
            item |= {"content": [part]}
        else:
            done = "response.function_call_arguments.done"
            events = [self._event(done, **position, name=item["name"], arguments=text)]
            item |= {"arguments": text}
        item |= {"status": status}
        self._item = None
        events.append(self._event("response.output_item.done", output_index=len(self._items), item=item))
        self._items.append(item)
        return b"".join(events)

    def _delta(self, name: str, text: str, **members: object) -> bytes:
        self._texts.append(text)
        self.kept += _TEXT_BYTES + _AGAIN * len(orjson.dumps(text))
        return self._event(name, **self._position(), **members, delta=text)

    def _position(self) -> dict[str, Any]:
        return {"item_id": self._item and self._item["id"], "output_index": len(self._items)}

    def _event(self, name: str, /, **members: object) -> bytes:
        number, self._numbered = self._numbered, self._numbered + 1
        return event(name, {"type": name, "sequence_number": number, **members})


def _status(end: Ending | None) -> str:
    return "completed" if end is None or end[0] == "stop" else "incomplete"


def _text(text: str, logprobs: bytes = _NO_LOGPROBS) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": orjson.Fragment(logprobs)}


def _call(name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": f"fc_{secrets.token_hex(12)}",
        "type": "function_call",
        "status": status,
        "call_id": f"call_{secrets.token_hex(12)}",
        "name": name,
        "arguments": arguments,
    }
