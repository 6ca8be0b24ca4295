"""ColumnsFormat: an answer as columns, as its rows came: protobuf's batches, or Arrow's stream with a row a token."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING

from tokenbus_contracts import Limits, PromptScores, decode, encode
from tokenbus_services.gateway.answer import WholeAnswer
from tokenbus_services.gateway.buffers import Buffers
from tokenbus_services.gateway.completion_request import CompletionRequest, Ending
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.event_writer import EventStream
from tokenbus_services.gateway.logprob_writers import Piece
from tokenbus_services.gateway.rendered_step import RenderedStep
from tokenbus_services.gateway.sse import StreamedAnswer
from tokenbus_services.gateway.validation import invalid
from tokenbus_services.gateway.vocabulary import Vocabulary
from tokenbus_services.items import delimited
from tokenbus_services.settings import GatewaySettings
from tokenbus_services.token_columns import TokenBuffer

if TYPE_CHECKING:
    from tokenbus_services.gateway.answer import Choice

PROTOBUF = "application/x-protobuf"
ARROW = "application/vnd.apache.arrow.stream"
_LIMITS = Limits.schema()
_BATCH_TOKENS = 64
"""A streamed batch has at least so many, as making one costs as much as taking several rows."""


class _Rows:
    """The rows of a choice, each as a message of the contract."""

    name = b""
    is_empty = False

    def __init__(self, joined: Callable[[Sequence[bytes]], bytes]) -> None:
        self.joined = joined

    def take(self, view: RenderedStep, place: int, count: int) -> bytes:  # noqa: ARG002 - all of its tokens
        """Return a row as a message."""
        return encode(view.batch.select([place]), _LIMITS)

    def echo(self, prompt: Sequence[int], scores: PromptScores | None, vocabulary: Vocabulary) -> Iterable[Piece]:  # noqa: ARG002
        """Return nothing: no body that asks for columns has `echo`."""
        return ()


class ProtobufFormat:
    """Writes a LogprobBatch for each row, behind its size as a varint, as protobuf's libraries read them in a row."""

    content_type = PROTOBUF
    kept = held = 0
    _prompt_limit = "null"
    """What a body may have for prompts' scores; empty: anything."""

    def __init__(self, request: CompletionRequest) -> None:
        """Begin an answer; raises an ApiError for what it cannot have."""
        for field, is_wanted, limit, got in (
            ("output_mode", request.wants_text, "tokens", "text"),
            ("sampling_params.stop", bool(request.stopping.texts), "none, but stop_token_ids,", "a text"),
            ("sampling_params.prompt_logprobs", request.wants_prompt_logprobs, self._prompt_limit, "a number"),
        ):
            if is_wanted and limit:
                raise invalid(field, f"{limit} where the answer is {self.content_type}, got {got}")

    def stream(self, index: int) -> EventStream:  # noqa: ARG002 - the protocol's
        """Return a choice whose rows are all for Python."""
        return EventStream()

    def parts(self, progress: EventStream) -> tuple[_Rows]:  # noqa: ARG002
        """Return the one writer of a choice."""
        return (_Rows(self._joined),)

    def scored(self, index: int, scores: PromptScores, vocabulary: Vocabulary) -> Iterable[int]:  # noqa: ARG002
        """Hold nothing of a prompt."""
        return ()

    def beginnings(self) -> bytes:
        """Return nothing: a stream begins with its first row."""
        return b""

    def chunk(self, choice: "Choice", text: str, pieces: Sequence[Piece]) -> bytes:  # noqa: ARG002
        """Return a row."""
        return self._joined([piece for piece in pieces if isinstance(piece, bytes)])

    def last(self, tokens: int) -> bytes:  # noqa: ARG002
        """Return nothing: each choice's last row says how it ended."""
        return b""

    def error(self, error: ApiError) -> bytes:  # noqa: ARG002
        """Return nothing: the connection is closed before the body's end."""
        return b""

    def choice(self, index: int, text: str, beside: Sequence[bytes], end: Ending | None) -> bytes:  # noqa: ARG002
        """Return a whole choice."""
        return b"".join(beside)

    def whole(self, choices: Sequence[bytes], tokens: int) -> bytes:  # noqa: ARG002
        """Return a whole answer."""
        return b"".join(choices)

    def _joined(self, messages: Sequence[bytes]) -> bytes:
        return b"".join(map(delimited, messages))


class ArrowFormat(ProtobufFormat):
    """Writes Arrow's stream of the token table; the last batch's metadata says how the choices ended."""

    content_type = ARROW
    _prompt_limit = ""

    def __init__(self, request: CompletionRequest) -> None:
        """Begin an answer; raises an ApiError for what it cannot have, or where pyarrow is missing."""
        super().__init__(request)
        try:
            import pyarrow as pa  # noqa: PLC0415 - an extra

            from tokenbus_services.token_table import PLAIN_SCHEMA, SCHEMA, token_batch  # noqa: PLC0415 - needs it
        except ImportError:
            raise ApiError(
                406, f"accept: {ARROW} needs the extra arrow at the gateway", code="not_acceptable"
            ) from None
        self._reasons: list[str | None] = [None] * request.choices
        self._tokens = TokenBuffer()
        self._sink = BytesIO()
        schema = SCHEMA if request.token_scoring else PLAIN_SCHEMA
        self._writer = pa.ipc.new_stream(self._sink, schema)
        self._batch_of = partial(token_batch, schema=schema)

    def scored(self, index: int, scores: PromptScores, vocabulary: Vocabulary) -> Iterable[int]:  # noqa: ARG002
        """Take the scores of a prompt."""
        self._tokens.add_scores(scores)
        return ()

    def chunk(self, choice: "Choice", text: str, pieces: Sequence[Piece]) -> bytes:
        """Return a batch, once there are tokens enough for one."""
        super().chunk(choice, text, pieces)
        if choice.ending is not None:
            self._reasons[choice.index] = choice.ending.reason
        return self._written() if choice.ending is not None or self._tokens.tokens >= _BATCH_TOKENS else b""

    def last(self, tokens: int) -> bytes:  # noqa: ARG002
        """Return the last batch, and the end of the stream."""
        return self._written({"finish_reasons": json.dumps(self._reasons)})

    def choice(self, index: int, text: str, beside: Sequence[bytes], end: Ending | None) -> bytes:  # noqa: ARG002
        """Note how a choice ended; its rows are in the buffer."""
        self._reasons[index] = None if end is None else end.reason
        return b""

    def whole(self, choices: Sequence[bytes], tokens: int) -> bytes:  # noqa: ARG002
        """Return a whole answer."""
        return self.last(tokens)

    def _joined(self, messages: Sequence[bytes]) -> bytes:
        for message in messages:
            self._tokens.add_batch(decode(message, _LIMITS))
        return b""

    def _written(self, metadata: Mapping[str, str] | None = None) -> bytes:
        self._writer.write_batch(self._batch_of(self._tokens.take()), custom_metadata=metadata)
        if metadata is not None:
            self._writer.close()
        written = self._sink.getvalue()
        self._sink.seek(0)
        self._sink.truncate()
        return written


class WholeColumns(WholeAnswer):
    """An answer as columns, when all choices have ended."""

    def __init__(
        self, request: CompletionRequest, form: ProtobufFormat, settings: GatewaySettings, buffers: Buffers
    ) -> None:
        super().__init__(request, form, settings, buffers)
        self.content_type = form.content_type


class StreamedColumns(StreamedAnswer):
    """An answer as columns, as they come; one that fails ends before the body's end."""

    def __init__(
        self, request: CompletionRequest, form: ProtobufFormat, settings: GatewaySettings, buffers: Buffers
    ) -> None:
        super().__init__(request, form, settings, buffers)
        self.content_type = form.content_type

    def _error_event(self, error: ApiError) -> bytes:
        self.outbox.is_broken = True
        return super()._error_event(error)


_FORMS: Mapping[str, type[ProtobufFormat]] = {PROTOBUF: ProtobufFormat, ARROW: ArrowFormat}


def wanted_columns(accept: str) -> type[ProtobufFormat] | None:
    """Return the form that an Accept header asks for first; None: JSON, or events."""
    first = accept.partition(",")[0].partition(";")[0].strip().lower()
    return _FORMS.get(first)
