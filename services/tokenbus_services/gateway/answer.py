"""Answers over HTTP: a completion's or chat's choices, streamed or whole, and the inspector's stream of tokens."""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

from tokenbus_contracts import RowStatus
from tokenbus_services.delivery.text import RunningText
from tokenbus_services.gateway.buffers import Buffers, Outbox
from tokenbus_services.gateway.choice import Choice, EmitJson, broken, reason_of
from tokenbus_services.gateway.completion_request import CompletionRequest
from tokenbus_services.gateway.dispatcher import Listener
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.logprob_writers import Piece
from tokenbus_services.gateway.openai_format import Envelope
from tokenbus_services.gateway.rendered_step import RenderedStep
from tokenbus_services.settings import GatewaySettings

EVENTS = "text/event-stream; charset=utf-8"
JSON = "application/json"
_ROW_BYTES = 150
"""What Python's objects for a row's text and pieces take: more than the contents of short ones."""
_UTF8 = codecs.getincrementaldecoder("utf-8")


class Answer:
    """What one response sends: an outbox, how it failed, and what it holds for a slow client.

    A subclass appends to the outbox as rows come, and names who takes the rows in `listeners`.
    """

    content_type = EVENTS
    has_begun = False
    """Whether the status 200 is certain: later errors are events of the stream."""
    listeners: Sequence[Listener]
    """Take the rows of each of its requests."""

    def __init__(self, most: int, buffers: Buffers) -> None:
        """Take the bound of what waits for its client, in bytes, and the sum over all clients."""
        self.outbox = Outbox(most, self._overflow, buffers)
        self.error: ApiError | None = None
        """Why it ended early, if it did."""
        self._most = most
        self._close: Callable[[], None] = lambda: None

    def begin(self, close: Callable[[], None]) -> None:
        """Begin: its requests are open; `close` aborts those that are still open when it ends early."""
        self._close = close

    def evict(self, size: int) -> None:
        """End because all answers together hold too much, and this one the most: so many bytes."""
        message = "too much waits for all clients together (gateway.buffer_bytes)"
        code = "slow_client" if self.content_type == EVENTS else "overloaded"
        self._end_slow(ApiError(503, f"{message}, {size} bytes of it for this answer", code=code))

    def end(self, error: ApiError) -> None:
        """End with an error: as the answer's status before it has begun, else as an event; ignored after the end."""
        if self.outbox.is_closed:
            return
        self.error = error
        if self.has_begun:
            self.outbox.put(self._error_event(error))
        self.outbox.close()
        self._close()

    def _error_event(self, error: ApiError) -> bytes:
        return event("error", error.body)

    def _overflow(self) -> None:
        limit = f"at most {self._most} bytes wait for a client (gateway.stream_buffer_bytes), which read too slowly"
        self._end_slow(ApiError(503, limit, code="slow_client"))

    def _end_slow(self, error: ApiError) -> None:
        is_closed = self.outbox.is_closed
        self.outbox.drop()
        if is_closed:  # its last events are lost: only closing the connection tells the client
            self.outbox.is_broken = True
        self.end(error)


class _ChoicesAnswer(Answer, ABC):
    """An answer with choices in OpenAI's form."""

    emit_json: EmitJson | None = None

    def __init__(
        self, request: CompletionRequest, envelope: Envelope, settings: GatewaySettings, buffers: Buffers
    ) -> None:
        """Take the request, the form, the bounds, and the sum over all clients."""
        super().__init__(settings.stream_buffer_bytes, buffers)
        self._envelope = envelope
        stopping = request.stopping
        self._choices = [Choice(index, stopping, envelope.parts(), self) for index in range(request.choices)]
        self._open = len(self._choices)
        self.listeners = self._choices
        self._fields = {"response_format": request.form_field, "prompt": "messages" if request.is_chat else "prompt"}

    @abstractmethod
    def emit(self, choice: Choice, text: str, pieces: list[Piece], produced_at_ns: int) -> None:
        """Add a row's text and pieces."""

    def end(self, error: ApiError) -> None:
        """End with an error, which names the field that the client sent."""
        for named, field in self._fields.items():
            error = error.about(named, field)
        super().end(error)

    @property
    def _tokens(self) -> int:
        return sum(each.tokens for each in self._choices)


class StreamedAnswer(_ChoicesAnswer):
    """Server-sent events: a chunk for each row."""

    def __init__(
        self, request: CompletionRequest, envelope: Envelope, settings: GatewaySettings, buffers: Buffers
    ) -> None:
        """Take the request, the form, the bounds, and the sum over all clients."""
        self.emit_json = self._emit_json if request.forced is None else None
        super().__init__(request, envelope, settings, buffers)

    def emit(self, choice: Choice, text: str, pieces: list[Piece], produced_at_ns: int) -> None:
        """Add a row's chunk."""
        if not self.has_begun:
            self._begin_stream()
        chunk = self._envelope.chunk(choice.index, text, choice.parts, pieces, choice.ending)
        if choice.reason is None:
            if chunk:
                self.outbox.put(chunk, produced_at_ns)
            return
        self._open -= 1
        if not self._open:
            chunk += self._envelope.last(self._tokens)
        self.outbox.put(chunk, produced_at_ns)
        if not self._open:
            self.outbox.close()

    def _emit_json(self, choice: Choice, text: bytes, view: RenderedStep, place: int) -> None:
        """Add the chunk of a row that does not end its choice, without a detour over its text."""
        if not self.has_begun:
            self._begin_stream()
        self.outbox.put(self._envelope.chunk_of_row(choice.index, text, choice.parts, view, place), view.produced_at_ns)

    def _begin_stream(self) -> None:
        self.has_begun = True
        self.outbox.put(self._envelope.beginnings())


class WholeAnswer(_ChoicesAnswer):
    """One JSON object, when all choices have ended."""

    content_type = JSON

    def __init__(
        self, request: CompletionRequest, envelope: Envelope, settings: GatewaySettings, buffers: Buffers
    ) -> None:
        """Take the request, the form, the bounds, and the sum over all clients."""
        super().__init__(request, envelope, settings, buffers)
        self._texts: list[list[str]] = [[] for _ in self._choices]
        self._pieces: list[list[list[Piece]]] = [[] for _ in self._choices]
        self._size = 0
        self._answer_bytes = settings.answer_bytes

    def emit(self, choice: Choice, text: str, pieces: list[Piece], _produced_at_ns: int) -> None:
        """Collect a row's text and pieces."""
        if self.outbox.is_closed:
            return
        self._texts[choice.index].append(text)
        self._pieces[choice.index].append(pieces)
        size = _ROW_BYTES + len(text) + sum(map(_size, pieces))
        self._size += size
        self.outbox.hold(size)
        if self.outbox.is_closed:  # evicted: that was too much for all answers together
            return
        if self._size > self._answer_bytes:
            limit = f"an answer of at most {self._answer_bytes} bytes (gateway.answer_bytes)"
            message = f"{limit}; a streamed one may be larger"
            self.end(ApiError(400, message, param="stream", code="answer_too_large"))
        elif choice.reason is not None:
            self._open -= 1
            if not self._open:
                self._finish()

    def end(self, error: ApiError) -> None:
        """End with an error instead of an answer."""
        if not self.outbox.is_closed:
            self._texts, self._pieces = [], []
            self.outbox.drop()
            super().end(error)

    def _overflow(self) -> None:
        """Do nothing: `answer_bytes` bounds what is collected, which the outbox counts."""

    def _finish(self) -> None:
        choices = [
            self._envelope.choice(
                choice.index, "".join(texts), [
                    part.name + part.joined(list(taken))
                    for part, taken in zip(choice.parts, zip(*rows, strict=True), strict=True)
                ], choice.ending,
            )
            for choice, texts, rows in zip(self._choices, self._texts, self._pieces, strict=True)
        ]  # fmt: skip
        self._texts, self._pieces = [], []
        self.outbox.drop()
        self.outbox.put(self._envelope.whole(choices, self._tokens))
        self.outbox.close()


class InspectedAnswer(Answer):
    """One request's tokens and all that is known of them: `begin`, a `row` for each row, `end` or `error`."""

    has_begun = True

    def __init__(self, request: CompletionRequest, key: int, settings: GatewaySettings, buffers: Buffers) -> None:
        """Take the request and its id, the bounds, and the sum over all clients."""
        super().__init__(settings.stream_buffer_bytes, buffers)
        self.tokens = 0
        self.listeners = (self,)
        self._request = request
        self._key = key
        self._decoder = _UTF8("replace")
        self._stopping = RunningText(request.stopping)

    def begin(self, close: Callable[[], None]) -> None:
        """Begin: its request is open."""
        super().begin(close)
        request = self._request
        begin = {"request": f"{self._key:016x}", "model": request.model, "prompt_tokens": request.prompt_tokens}
        self.outbox.put(event("begin", begin))

    def take(self, view: RenderedStep, place: int) -> bool:
        """Add a row; return whether more are wanted."""
        count, position = view.counts[place], self.tokens
        begin = view.begins[place]
        ids = view.ids[begin : begin + count]
        if self._request.stop:
            _, count = self._stopping.add_until_stop(map(view.vocabulary.pieces.__getitem__, ids))
            ids = ids[:count]
        self.tokens += count
        if count:
            self.outbox.put(event("row", self._row(view, place, ids, position)), view.produced_at_ns)
        error = broken(view, place, self.tokens)
        reason = "stop" if self._stopping.is_stopped else reason_of(view, place)
        if error is not None:
            self.end(error)
        elif reason is not None:
            self.outbox.put(event("end", {"reason": reason, "tokens": self.tokens}))
            self.outbox.close()
        return reason is None and error is None

    def _error_event(self, error: ApiError) -> bytes:
        members = {"code": error.code or "error", "message": error.message, "tokens": self.tokens}
        return event("error", members)

    def _row(self, view: RenderedStep, place: int, ids: Sequence[int], position: int) -> dict[str, Any]:
        header = view.batch.header
        return {
            "worker": header.worker_id,
            "epoch": str(header.epoch),
            "step": header.step,
            "position": position,
            "status": RowStatus(view.statuses[place]).name.lower(),
            "verified": int(view.batch.draft_token_counts[place]),
            "tokens": list(self._tokens(view, place, ids)),
            "draft": list(_draft(view, place, ids)),
        }

    def _tokens(self, view: RenderedStep, place: int, ids: Sequence[int]) -> Iterator[dict[str, Any]]:
        row = view.batch.row(place)
        pieces = view.vocabulary.pieces
        logprobs, ranks = row.logprobs.tolist(), row.ranks.tolist()
        others = zip(row.alternative_token_ids.tolist(), row.alternative_logprobs.tolist(), strict=True)
        for number, (token_id, (other_ids, other_logprobs)) in enumerate(zip(ids, others, strict=False)):
            text, name = self._decoder.decode(pieces[token_id]), _name(view, token_id)
            # A part of a character brings no text, or all of it; a token that ends a text has none.
            named = {} if name == text else {"name": name}
            yield {
                "id": token_id,
                "text": text,
                **named,
                "logprob": logprobs[number] if logprobs else None,
                "rank": ranks[number] if ranks else None,
                "alternatives": [
                    [other, _name(view, other), logprob]
                    for other, logprob in zip(other_ids, other_logprobs, strict=True)
                ],
            }


def event(name: str, data: object) -> bytes:
    """Return a server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))


def _size(piece: Piece) -> int:
    if piece is None:
        return 0
    return len(piece) if isinstance(piece, bytes) else sum(map(len, piece))


def _draft(view: RenderedStep, place: int, ids: Sequence[int]) -> Iterator[dict[str, Any]]:
    found = view.drafted(place)
    if found is None:
        return
    draft, there = found
    row = draft.batch.row(there)
    logprobs = row.logprobs.tolist() or [None] * row.token_ids.size
    for number, (token_id, logprob) in enumerate(zip(row.token_ids.tolist(), logprobs, strict=True)):
        accepted = number < len(ids) and ids[number] == token_id
        yield {"id": token_id, "text": _name(view, token_id), "logprob": logprob, "accepted": accepted}


def _name(view: RenderedStep, token_id: int) -> str:
    """Return a token's unique name: as text, two parts of characters would look the same."""
    return str(orjson.loads(view.vocabulary.names[token_id]))
