"""InspectedAnswer: a request's tokens with all that is known of each, for people to look at."""

import codecs
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

from tokenbus_contracts import RowStatus
from tokenbus_services.gateway.answer import EVENTS, crowded, event, too_slow
from tokenbus_services.gateway.buffers import Buffers, Outbox
from tokenbus_services.gateway.choice import RunningText, broken, reason_of
from tokenbus_services.gateway.completion_request import CompletionRequest
from tokenbus_services.gateway.dispatcher import Listener
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.rendered_step import RenderedStep
from tokenbus_services.settings import GatewaySettings

_UTF8 = codecs.getincrementaldecoder("utf-8")


class InspectedAnswer:
    """Events: `begin`, a `row` for each row with a token, and `end` or `error`."""

    content_type = EVENTS
    error: ApiError | None = None
    has_begun = True

    def __init__(self, asked: CompletionRequest, key: int, settings: GatewaySettings, buffers: Buffers) -> None:
        """Take what is asked, the request's key, the bounds, and the sum of what waits for all."""
        self.outbox = Outbox(settings.stream_buffer_bytes, self._too_slow, buffers)
        self.tokens = 0
        self._asked = asked
        self._key = key
        self._most = settings.stream_buffer_bytes
        self._decoder = _UTF8("replace")
        self._stopping = RunningText(asked.stop)
        self._close: Callable[[], None] = _nothing

    @property
    def listeners(self) -> Sequence[Listener]:
        """Itself: it has one request."""
        return (self,)

    def begin(self, close: Callable[[], None]) -> None:
        """Begin: its request is open."""
        self._close = close
        asked = self._asked
        begin = {"request": f"{self._key:016x}", "model": asked.model, "prompt_tokens": asked.prompt_tokens}
        self.outbox.put(event("begin", begin))

    def take(self, view: RenderedStep, place: int) -> bool:
        """Take a row; tell whether more are wanted."""
        count, position = view.counts[place], self.tokens
        begin = view.begins[place]
        ids = view.ids[begin : begin + count]
        if self._asked.stop:
            _, count = self._stopping.add_until_stop(map(view.vocabulary.pieces.__getitem__, ids))
            ids = ids[:count]
        self.tokens += count
        if count:
            self.outbox.put(event("row", self._row(view, place, ids, position)), view.produced_at_ns)
        error = broken(view, place, self.tokens)
        reason = "stop" if self._stopping.is_stopped else reason_of(view, place)
        if error is not None:
            self.fail(error)
        elif reason is not None:
            self.outbox.put(event("end", {"reason": reason, "tokens": self.tokens}))
            self.outbox.close()
        return reason is None and error is None

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

    def fail(self, error: ApiError) -> None:
        """End with an error."""
        if not self.outbox.is_closed:
            self.error = error
            told = {"code": error.code or "error", "message": error.message, "tokens": self.tokens}
            self.outbox.put(event("error", told))
            self.outbox.close()
            self._close()

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

    def _too_slow(self) -> None:
        self._end_slow(too_slow(self._most))

    def _end_slow(self, error: ApiError) -> None:
        is_closed = self.outbox.is_closed
        self.outbox.drop()
        if is_closed:
            self.outbox.is_broken = True
        self.fail(error)


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
    """Return what no other token is called: two parts of characters would look the same as text."""
    return str(orjson.loads(view.vocabulary.names[token_id]))


def _nothing() -> None:
    """Nobody is to be told."""
