"""Answers: the choices of one request together, as a stream of events or as one body."""

from collections.abc import Callable, Sequence
from typing import Protocol

import orjson

from tokenbus_services.gateway.buffers import Buffers, Outbox
from tokenbus_services.gateway.choice import Choice
from tokenbus_services.gateway.completion_request import CompletionRequest
from tokenbus_services.gateway.dispatcher import Listener
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.logprob_writers import Piece
from tokenbus_services.gateway.openai_format import Envelope
from tokenbus_services.settings import GatewaySettings

EVENTS = "text/event-stream; charset=utf-8"
JSON = "application/json"
_ROW_BYTES = 150
"""What the objects take that hold a row's text and pieces: of short ones far more than these themselves."""


class Answer(Protocol):
    """What a response sends, and when it is told that nobody reads any more."""

    outbox: Outbox
    error: ApiError | None
    """What went wrong; an answer that has begun ends with it, another one is it."""
    has_begun: bool
    """Whether something is to be sent, or was, as the beginning of an answer."""
    content_type: str

    @property
    def listeners(self) -> Sequence[Listener]:
        """Who takes the rows of each of its requests."""

    @property
    def held(self) -> int:
        """How many bytes wait for its client."""

    @property
    def unsent(self) -> int:
        """How many bytes the socket holds that its client has not taken."""

    def begin(self, close: Callable[[], None]) -> None:
        """Begin: its requests are open; `close` ends those that are still open when it must end early."""

    def evict(self) -> None:
        """End because all clients' answers hold too much, and this one the most."""


class StreamedAnswer:
    """Server-sent events: a chunk for each row."""

    content_type = EVENTS

    def __init__(
        self, asked: CompletionRequest, envelope: Envelope, settings: GatewaySettings, buffers: Buffers
    ) -> None:
        """Take what is asked, the form, the bounds, and the sum of what waits for all."""
        self.outbox = Outbox(settings.stream_buffer_bytes, self._too_slow, buffers)
        self.error: ApiError | None = None
        self._envelope = envelope
        self._choices = [Choice(index, asked.stop, envelope.parts(), self) for index in range(asked.choices)]
        self._open = len(self._choices)
        self.has_begun = False
        self._close: Callable[[], None] = _nothing
        self._most = settings.stream_buffer_bytes

    @property
    def listeners(self) -> Sequence[Listener]:
        """Who takes the rows of each of its requests."""
        return self._choices

    def begin(self, close: Callable[[], None]) -> None:
        """Begin: its requests are open."""
        self._close = close

    def emit(self, choice: Choice, text: str, pieces: list[Piece], produced_at_ns: int) -> None:
        """Take what a row brought."""
        if not self.has_begun:
            self.has_begun = True
            self.outbox.put(self._envelope.beginnings())
        chunk = self._envelope.chunk(choice.index, text, choice.parts, pieces, choice.reason)
        if choice.reason is None:
            self.outbox.put(chunk, produced_at_ns)
            return
        self._open -= 1
        if not self._open:
            chunk += self._envelope.last(sum(each.tokens for each in self._choices))
        self.outbox.put(chunk, produced_at_ns)
        if not self._open:
            self.outbox.close()

    def fail(self, _choice: Choice | None, error: ApiError) -> None:
        """End with an error: as the answer's status while nothing was sent, else as an event."""
        if self.outbox.is_closed:
            return
        self.error = error
        if self.has_begun:
            self.outbox.put(event("error", error.body))
        self.outbox.close()
        self._close()

    @property
    def held(self) -> int:
        """How many bytes wait for its client."""
        return self.outbox.size

    @property
    def unsent(self) -> int:
        """How many bytes the socket holds that its client has not taken."""
        return self.outbox.unsent()

    def evict(self) -> None:
        """End because all clients' answers hold too much, and this one the most."""
        self._end_slow(crowded(self.outbox.size))

    def _too_slow(self) -> None:
        self._end_slow(too_slow(self._most))

    def _end_slow(self, error: ApiError) -> None:
        is_closed = self.outbox.is_closed
        self.outbox.drop()
        if is_closed:  # its last events are gone: only the connection's end can say so
            self.outbox.is_broken = True
            return
        self.fail(None, error)


class WholeAnswer:
    """One JSON object, when all choices have ended."""

    content_type = JSON
    has_begun = False
    """It is sent when nothing can go wrong any more."""

    def __init__(
        self, asked: CompletionRequest, envelope: Envelope, settings: GatewaySettings, buffers: Buffers
    ) -> None:
        """Take what is asked, the form, the bounds, and the sum of what waits for all."""
        # What is collected is bounded here; the outbox counts it, and holds nothing but the finished answer.
        self.outbox = Outbox(4 * settings.answer_bytes, _nothing, buffers)
        self.error: ApiError | None = None
        self._envelope = envelope
        self._choices = [Choice(index, asked.stop, envelope.parts(), self) for index in range(asked.choices)]
        self._texts: list[list[str]] = [[] for _ in self._choices]
        self._pieces: list[list[list[Piece]]] = [[] for _ in self._choices]
        self._open = len(self._choices)
        self._size = 0
        self._most = settings.answer_bytes
        self._close: Callable[[], None] = _nothing

    @property
    def listeners(self) -> Sequence[Listener]:
        """Who takes the rows of each of its requests."""
        return self._choices

    def begin(self, close: Callable[[], None]) -> None:
        """Begin: its requests are open."""
        self._close = close

    def emit(self, choice: Choice, text: str, pieces: list[Piece], _produced_at_ns: int) -> None:
        """Keep what a row brought."""
        if self.outbox.is_closed:
            return
        self._texts[choice.index].append(text)
        self._pieces[choice.index].append(pieces)
        size = _ROW_BYTES + len(text) + sum(map(_size, pieces))
        self._size += size
        self.outbox.hold(size)
        if self.outbox.is_closed:  # that was too much for all together
            return
        if self._size > self._most:
            limit = f"an answer of at most {self._most} bytes (gateway.answer_bytes); a streamed one may be larger"
            self.fail(choice, ApiError(400, limit, param="stream", code="answer_too_large"))
        elif choice.reason is not None:
            self._open -= 1
            if not self._open:
                self._finish()

    def fail(self, _choice: Choice | None, error: ApiError) -> None:
        """End with an error instead of an answer."""
        if not self.outbox.is_closed:
            self.error = error
            self._texts, self._pieces = [], []
            self.outbox.drop()
            self.outbox.close()
            self._close()

    @property
    def held(self) -> int:
        """How many bytes were collected, or wait for its client."""
        return self.outbox.size

    @property
    def unsent(self) -> int:
        """How many bytes the socket holds that its client has not taken."""
        return self.outbox.unsent()

    def evict(self) -> None:
        """End because all clients' answers hold too much, and this one the most."""
        if self.outbox.is_closed:
            self.outbox.drop()
            self.outbox.is_broken = True
        else:
            self.fail(None, crowded(self.outbox.size, "overloaded"))

    def _finish(self) -> None:
        if self.outbox.is_closed:
            return
        choices = [
            self._envelope.choice(
                choice.index, "".join(texts), [
                    part.name + part.joined(list(taken))
                    for part, taken in zip(choice.parts, zip(*rows, strict=True), strict=True)
                ], choice.reason,
            )
            for choice, texts, rows in zip(self._choices, self._texts, self._pieces, strict=True)
        ]  # fmt: skip
        self._texts, self._pieces = [], []
        self.outbox.drop()
        self.outbox.put(self._envelope.whole(choices, sum(each.tokens for each in self._choices)))
        self.outbox.close()


def event(name: str, data: object) -> bytes:
    """Return a server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))


def too_slow(most: int) -> ApiError:
    """Return the error of a stream whose client leaves too much waiting."""
    limit = f"at most {most} bytes wait for a client (gateway.stream_buffer_bytes), which read too slowly"
    return ApiError(503, limit, code="slow_client")


def crowded(held: int, code: str = "slow_client") -> ApiError:
    """Return the error of an answer that held the most where all together held too much."""
    message = f"too much waits for all clients together (gateway.buffer_bytes), {held} bytes of it in this answer"
    return ApiError(503, message, code=code)


def _size(piece: Piece) -> int:
    if piece is None:
        return 0
    return len(piece) if isinstance(piece, bytes) else sum(map(len, piece))


def _nothing() -> None:
    """Nobody is to be told."""
