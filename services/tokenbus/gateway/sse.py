"""Server-sent events: answers that are streamed, in chunks of an API's form or as the inspector's tokens."""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import chain
from typing import Any

import orjson

from tokenbus.client.tokens import Turn
from tokenbus.client.weight_spans import WeightSpan
from tokenbus.gateway.answer import REASONS, UNRECOVERABLE, Answer, Choice, ChoicesAnswer, unrecoverable
from tokenbus.gateway.buffers import Buffers
from tokenbus.gateway.completion_request import CompletionRequest
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.event_writer import EventStream
from tokenbus.gateway.logprob_writers import Piece
from tokenbus.gateway.rendered_step import RenderedStep
from tokenbus.gateway.stop_strings import RunningText
from tokenbus.gateway.vocabulary import Vocabulary
from tokenbus.settings import GatewaySettings
from tokenbus_contracts import PromptScores, RowStatus

EVENTS = "text/event-stream; charset=utf-8"
_UTF8 = codecs.getincrementaldecoder("utf-8")


def event(name: str, data: object) -> bytes:
    """Return a server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))


class StreamedAnswer(ChoicesAnswer):
    """A completion's or chat's choices: a chunk for each row."""

    content_type = EVENTS
    is_streamed = True
    _held = 0
    """Characters that are held back, as they may be a call."""
    _kept = 0
    """What of the form's `kept` the outbox counts."""

    def emit(self, choice: Choice, text: str, pieces: list[Piece], produced_at_ns: int) -> None:
        """Add a row's chunk."""
        if not self.has_begun:
            self._begin_stream()
        chunk = self._format.chunk(choice, text, pieces)
        if self._request.auto is not None:
            self._hold_back()
        if self._format.kept > self._kept and not self._keep():
            return
        if choice.reason is None:
            if chunk:
                self.outbox.put(chunk, produced_at_ns)
            return
        self._open -= 1
        if not self._open:
            chunk += self._format.last(self._tokens, self._cached)
        self.outbox.put(chunk, produced_at_ns)
        if not self._open:
            self.outbox.close()

    def write_prompt(self, parts: Iterable[int]) -> None:
        """Do nothing: the reader refuses prompts' scores in a stream."""

    def begin_with(self, choice: Choice, text: str, rows: Iterable[list[Piece]]) -> None:
        """Add a prompt's chunks, which are made as its client reads: they may be many."""
        if not self.has_begun:
            self._begin_stream()
        before = copy(choice)  # as it is before its rows, of which some come before the last of these chunks is made
        before.stream = EventStream()
        others = iter(rows)
        first = self._format.chunk(before, text, next(others))
        self.outbox.put_parts(chain([first], (self._format.chunk(before, "", pieces) for pieces in others)))

    def put_events(self, data: bytes, produced_at_ns: int) -> None:
        """Send a row's events that were written without its choice."""
        if not self.has_begun:
            self._begin_stream()
        super().put_events(data, produced_at_ns)

    def _hold_back(self) -> None:
        """Count what is held back to what the answer holds."""
        if not self.outbox.is_closed:
            before, self._held = self._held, self._format.held
            self.outbox.hold(self._held - before)

    def _begin_stream(self) -> None:
        self.has_begun = True
        self.outbox.put(self._format.beginnings())

    def _keep(self) -> bool:
        """Count what the last events will have again; return whether the stream goes on."""
        grown, self._kept = self._format.kept - self._kept, self._format.kept
        self.outbox.keep(grown)
        if self._kept > self._answer_bytes:
            message = f"an answer of at most {self._answer_bytes} bytes"
            self.end(ApiError(400, message, code="answer_too_large"))
        return not self.outbox.is_closed

    def _error_event(self, error: ApiError) -> bytes:
        return self._format.error(error)


class InspectedAnswer(Answer):
    """One request's tokens and all that is known of them: `begin`, a `row` for each row, `end` or `error`."""

    content_type = EVENTS
    is_streamed = True
    has_begun = True
    stream: EventStream | None = None
    cached_tokens: int | None = None
    turns: Sequence[Turn] = ()

    def __init__(self, request: CompletionRequest, key: int, settings: GatewaySettings, buffers: Buffers) -> None:
        super().__init__(settings.stream_buffer_bytes, buffers)
        self.tokens = 0
        self.listeners = (self,)
        self._request = request
        self.model = request.model
        self._key = key
        self._decoder = _UTF8("replace")
        self._stops = bool(request.stopping.texts)
        self._stopping = RunningText(request.stopping)

    def begin(self, close: Callable[[], None]) -> None:
        """Begin: its request is open."""
        super().begin(close)
        request = self._request
        begin = {"request": f"{self._key:016x}", "model": request.model, "prompt_tokens": request.prompt_tokens}
        self.outbox.put(event("begin", begin))

    def scored(self, scores: PromptScores, vocabulary: Vocabulary) -> None:
        """Take the scores of its prompt, for which it does not ask."""

    def take(self, view: RenderedStep, place: int) -> bool:
        """Add a row; return whether more are wanted."""
        count, position = view.counts[place], self.tokens
        begin = view.begins[place]
        ids = view.ids[begin : begin + count]
        if self._stops:
            _, count = self._stopping.add_until_stop(map(view.vocabulary.pieces.__getitem__, ids))
            ids = ids[:count]
        self.tokens += count
        if count:
            self.outbox.put(event("row", self._row(view, place, ids, position)), view.produced_at_ns)
        status = view.statuses[place]
        if status == UNRECOVERABLE:
            self.end(unrecoverable(self.tokens))
            return False
        reason = REASONS.get(status) if self._stopping.stop is None else "stop"
        if reason is not None:
            history = history_of(view.weight_spans(place), self.turns)
            self.outbox.put(event("end", {"reason": reason, "tokens": self.tokens, **history}))
            self.outbox.close()
        return reason is None

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
        entropies = [] if row.extras is None else row.extras.entropies.tolist()
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
                **({"entropy": entropies[number]} if entropies else {}),
                "alternatives": [
                    [other, _name(view, other), logprob]
                    for other, logprob in zip(other_ids, other_logprobs, strict=True)
                ],
            }


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


def history_of(spans: Sequence[WeightSpan], turns: Sequence[Turn]) -> dict[str, list[dict[str, str | int]]]:
    """Return which weights computed a choice, as vLLM's API has them, whose versions are texts, and its turns."""
    versions: list[dict[str, str | int]] = [
        {"version": str(span.weight_version), "start": span.begin, "end": span.end} for span in spans
    ]
    parts: list[dict[str, str | int]] = [
        {"request_id": f"{turn.request_id:016x}", "start": turn.begin, "reason": turn.reason} for turn in turns
    ]
    return ({"weight_versions": versions} if versions else {}) | ({"turns": parts} if parts else {})
