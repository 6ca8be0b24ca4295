"""Answers over HTTP: what all have in common, and a completion's or chat's choices as one JSON object."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from tokenbus_services.gateway.buffers import Buffers, Outbox
from tokenbus_services.gateway.choice import Choice, EmitJson
from tokenbus_services.gateway.completion_request import CompletionRequest
from tokenbus_services.gateway.dispatcher import Listener
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.logprob_writers import Piece
from tokenbus_services.gateway.openai_format import Envelope
from tokenbus_services.settings import GatewaySettings

JSON = "application/json"
_ROW_BYTES = 150
"""What Python's objects for a row's text and pieces take: more than the contents of short ones."""


class Answer:
    """What one response sends: an outbox, how it failed, and what it holds for a slow client.

    A subclass appends to the outbox as rows come, and names who takes the rows in `listeners`.
    """

    content_type: str
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
        code = "overloaded" if self.content_type == JSON else "slow_client"
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

    def _error_event(self, _error: ApiError) -> bytes:
        """Return what a stream that has begun sends of its error; other answers have a status."""
        return b""

    def _overflow(self) -> None:
        limit = f"at most {self._most} bytes wait for a client (gateway.stream_buffer_bytes), which read too slowly"
        self._end_slow(ApiError(503, limit, code="slow_client"))

    def _end_slow(self, error: ApiError) -> None:
        is_closed = self.outbox.is_closed
        self.outbox.drop()
        if is_closed:  # its last events are lost: only closing the connection tells the client
            self.outbox.is_broken = True
        self.end(error)


class ChoicesAnswer(Answer, ABC):
    """An answer with choices in OpenAI's form."""

    emit_json: EmitJson | None = None

    def __init__(
        self, request: CompletionRequest, envelope: Envelope, settings: GatewaySettings, buffers: Buffers
    ) -> None:
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


class WholeAnswer(ChoicesAnswer):
    """One JSON object, when all choices have ended."""

    content_type = JSON

    def __init__(
        self, request: CompletionRequest, envelope: Envelope, settings: GatewaySettings, buffers: Buffers
    ) -> None:
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


def _size(piece: Piece) -> int:
    if piece is None:
        return 0
    return len(piece) if isinstance(piece, bytes) else sum(map(len, piece))
