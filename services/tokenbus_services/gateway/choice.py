"""Choice: one request's rows as text and what stands beside it, for whichever answer it is part of."""

from collections.abc import Sequence
from typing import Protocol

from tokenbus_contracts import RowStatus
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.logprob_writers import Part, Piece
from tokenbus_services.gateway.rendered_step import RenderedStep
from tokenbus_services.gateway.text import RunningText

_REASONS = {int(RowStatus.FINISHED_STOP): "stop", int(RowStatus.FINISHED_LENGTH): "length"}
_BROKEN = {
    int(RowStatus.ABORTED): (503, "the request was aborted", "aborted"),
    int(RowStatus.UNRECOVERABLE): (502, "the request's state is lost and cannot be computed again", "unrecoverable"),
}


def reason_of(view: RenderedStep, place: int) -> str | None:
    """Return why a row is its request's last, or None: it is not."""
    return _REASONS.get(view.statuses[place])


def broken(view: RenderedStep, place: int, tokens: int) -> ApiError | None:
    """Return the error that a row says its request ended with."""
    found = _BROKEN.get(view.statuses[place])
    if found is None:
        return None
    status, message, code = found
    error = ApiError(status, f"{message} (after {tokens} tokens)", code=code)
    error.tokens = tokens
    return error


class Sink(Protocol):
    """Who takes what choices say."""

    def emit(self, choice: "Choice", text: str, pieces: list[Piece], produced_at_ns: int) -> None:
        """Take what a row brought; its choice's `reason` says whether that was the last."""

    def fail(self, choice: "Choice", error: ApiError) -> None:
        """Take the error that ended a choice."""


class Choice:
    """One choice of an answer."""

    __slots__ = ("_is_silent", "_sink", "_stops", "_text", "index", "parts", "reason", "tokens")

    def __init__(self, index: int, stops: Sequence[str], parts: Sequence[Part], sink: Sink) -> None:
        """Take its number, what ends its text, what stands beside the text, and who is told."""
        self.index = index
        self.parts = parts
        self.tokens = 0
        self.reason: str | None = None
        """Why it ended, once it has."""
        self._stops = bool(stops)
        self._text = RunningText(stops)
        self._sink = sink
        # Text that is held back brings nothing to tell, unless its tokens are told of too.
        self._is_silent = all(part.is_empty for part in parts)

    def take(self, view: RenderedStep, place: int) -> bool:
        """Take a row; tell whether more are wanted."""
        count = view.counts[place]
        text = ""
        if count and self._stops:
            begin = view.begins[place]
            pieces = view.vocabulary.pieces
            text, count = self._text.add_until_stop(pieces[token] for token in view.ids[begin : begin + count])
        elif count:
            text = self._text.add(view.data(place))
        self.tokens += count
        error = broken(view, place, self.tokens)
        if error is not None:
            self._sink.fail(self, error)
            return False
        self.reason = "stop" if self._text.is_stopped else reason_of(view, place)
        if self.reason is not None:
            text += self._text.end()
        if self.reason is not None or text or (count and not self._is_silent):
            taken = [part.take(view, place, count) for part in self.parts]
            self._sink.emit(self, text, taken, view.produced_at_ns)
        return self.reason is None

    def fail(self, error: ApiError) -> None:
        """Take the error that ends it."""
        error.tokens = self.tokens
        self._sink.fail(self, error)
