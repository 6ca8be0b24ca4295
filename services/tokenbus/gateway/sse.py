"""Streamed answers: chunks in the format of an API, or events for the inspector."""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import chain
from typing import Any

import orjson

from tokenbus.client.tokens import Turn
from tokenbus.client.weight_spans import WeightSpan
from tokenbus.gateway.answer import Answer, Choice, Format, Outcome
from tokenbus.gateway.completion_request import CompletionRequest
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.event_writer import EventStream
from tokenbus.gateway.logprob_writers import MemberWriter, Piece
from tokenbus.gateway.rendered_step import RenderedStep
from tokenbus_contracts import RowStatus

EVENTS = "text/event-stream; charset=utf-8"
_UTF8 = codecs.getincrementaldecoder("utf-8")


def event(name: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))


class StreamedAnswer(Answer):
    """An answer that is streamed, with one chunk for each row."""

    content_type = EVENTS
    is_streamed = True
    _held = 0
    _kept = 0
    """Number of bytes that the last events will repeat, as last counted in the queue."""

    def begin(self, close: Callable[[], None]) -> None:
        super().begin(close)
        if isinstance(self._format, InspectorFormat):
            self._begin_stream()

    def outcomes(self) -> Iterator[Outcome]:
        """Return the results of the requests, or nothing for the inspector, whose requests are not counted."""
        return iter(()) if isinstance(self._format, InspectorFormat) else super().outcomes()

    def emit(self, choice: Choice, text: str, pieces: list[Piece], produced_at_ns: int) -> None:
        self._begin_stream()
        chunk = self._format.chunk(choice, text, pieces)
        if self._request.auto is not None and not self.queue.is_closed:
            before, self._held = self._held, self._format.held
            self.queue.hold(self._held - before)
        if self._format.kept > self._kept and not self._keep():
            return
        if choice.reason is None:
            if chunk:
                self.queue.put(chunk, produced_at_ns)
            return
        self._open -= 1
        if not self._open:
            chunk += self._format.last(self._tokens, self._cached)
        self.queue.put(chunk, produced_at_ns)
        if not self._open:
            self.queue.close()

    def write_prompt(self, parts: Iterable[int]) -> None:
        """Do nothing, because the reader refuses streams with prompt scores."""

    def begin_with(self, choice: Choice, text: str, rows: Iterable[list[Piece]]) -> None:
        self._begin_stream()
        # Copy the choice: the queue computes these chunks later, when new rows have changed the choice.
        before = copy(choice)
        before.stream = EventStream()
        others = iter(rows)
        first = self._format.chunk(before, text, next(others))
        self.queue.put_parts(chain([first], (self._format.chunk(before, "", pieces) for pieces in others)))

    def put_events(self, data: bytes, produced_at_ns: int) -> None:
        self._begin_stream()
        super().put_events(data, produced_at_ns)

    def _begin_stream(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.queue.put(self._format.beginnings())

    def _keep(self) -> bool:
        """Count the bytes that the last events will repeat. Return False if the stream has ended."""
        grown, self._kept = self._format.kept - self._kept, self._format.kept
        self.queue.keep(grown)
        if self._kept > self._settings.answer_bytes:
            message = f"an answer of at most {self._settings.answer_bytes} bytes"
            self.end(ApiError(400, message, code="answer_too_large"))
        return not self.queue.is_closed

    def _error_event(self, error: ApiError) -> bytes:
        return self._format.error(error)


class InspectorFormat(Format):
    """Writes an answer for the inspector as events: `begin`, a `row` for each row, then `end` or `error`."""

    def __init__(self, request: CompletionRequest, request_id: int) -> None:
        facts = {"model": request.model, "prompt_tokens": request.prompt_tokens}
        self._begin = event("begin", {"request": f"{request_id:016x}", **facts})
        self._tokens = 0

    def writers(self, progress: EventStream) -> tuple[MemberWriter, ...]:  # noqa: ARG002
        return (_Facts(),)

    def beginnings(self) -> bytes:
        return self._begin

    def chunk(self, choice: Choice, text: str, pieces: Sequence[Piece]) -> bytes:  # noqa: ARG002 - the rows have it
        self._tokens = choice.tokens
        events = list(chain(*pieces))
        if choice.ending is not None:
            reason, _, spans, turns = choice.ending
            events.append(event("end", {"reason": reason, "tokens": choice.tokens, **history_of(spans, turns)}))
        return b"".join(events)

    def error(self, error: ApiError) -> bytes:
        members = {"code": error.code or "error", "message": error.message, "tokens": self._tokens}
        return event("error", members)


class _Facts(MemberWriter):
    """Writes the event of a row."""

    name = b""

    def __init__(self) -> None:
        self._position = 0
        self._decoder = _UTF8("replace")

    def take(self, step: RenderedStep, row: int, count: int) -> Piece:
        if not count:
            return ()
        header, ids, position = step.batch.header, step.row_ids(row)[:count], self._position
        self._position += count
        facts = {
            "worker": header.worker_id,
            "epoch": str(header.epoch),
            "step": header.step,
            "position": position,
            "status": RowStatus(step.statuses[row]).name.lower(),
            "verified": int(step.batch.draft_token_counts[row]),
            "tokens": list(self._tokens(step, row, ids)),
            "draft": list(_draft(step, row, ids)),
        }
        return (event("row", facts),)

    def _tokens(self, step: RenderedStep, row: int, ids: Sequence[int]) -> Iterator[dict[str, Any]]:
        columns = step.batch.row(row)
        pieces = step.vocabulary.pieces
        logprobs, ranks = columns.logprobs.tolist(), columns.ranks.tolist()
        entropies = [] if columns.extras is None else columns.extras.entropies.tolist()
        others = zip(columns.alternative_token_ids.tolist(), columns.alternative_logprobs.tolist(), strict=True)
        for number, (token_id, (other_ids, other_logprobs)) in enumerate(zip(ids, others, strict=False)):
            text, name = self._decoder.decode(pieces[token_id]), _name(step, token_id)
            # The name of a split character or a special token differs from the text.
            named = {} if name == text else {"name": name}
            yield {
                "id": token_id,
                "text": text,
                **named,
                "logprob": logprobs[number] if logprobs else None,
                "rank": ranks[number] if ranks else None,
                **({"entropy": entropies[number]} if entropies else {}),
                "alternatives": [
                    [other, _name(step, other), logprob]
                    for other, logprob in zip(other_ids, other_logprobs, strict=True)
                ],
            }


def _draft(step: RenderedStep, row: int, ids: Sequence[int]) -> Iterator[dict[str, Any]]:
    found = step.drafted(row)
    if found is None:
        return
    draft, proposed = found
    columns = draft.batch.row(proposed)
    logprobs = columns.logprobs.tolist() or [None] * columns.token_ids.size
    for number, (token_id, logprob) in enumerate(zip(columns.token_ids.tolist(), logprobs, strict=True)):
        accepted = number < len(ids) and ids[number] == token_id
        yield {"id": token_id, "text": _name(step, token_id), "logprob": logprob, "accepted": accepted}


def _name(step: RenderedStep, token_id: int) -> str:
    """Return the unique name of a token. Texts are not unique, because parts of different characters look alike."""
    return str(orjson.loads(step.vocabulary.names[token_id]))


def history_of(spans: Sequence[WeightSpan], turns: Sequence[Turn]) -> dict[str, list[dict[str, str | int]]]:
    versions: list[dict[str, str | int]] = [
        {"version": str(span.weight_version), "start": span.begin, "end": span.end} for span in spans
    ]
    history = {"weight_versions": versions} if versions else {}
    if turns:
        history["turns"] = [
            {"request_id": f"{turn.request_id:016x}", "start": turn.begin, "reason": turn.reason} for turn in turns
        ]
    return history
