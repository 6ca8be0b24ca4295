"""Choice: one request's rows as text, and what is beside it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from tokenbus_contracts import RowStatus
from tokenbus_contracts.batch import STOP_TOKEN
from tokenbus_services.delivery.stop_strings import RunningText, Stopping
from tokenbus_services.delivery.tokens import stop_of
from tokenbus_services.gateway.completion_request import Ending
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.logprob_writers import Part, Piece
from tokenbus_services.gateway.rendered_step import RenderedStep

_STOPPED = int(RowStatus.FINISHED_STOP)
_REASONS = {int(RowStatus.FINISHED_STOP): "stop", int(RowStatus.FINISHED_LENGTH): "length"}
_BROKEN = {
    int(RowStatus.ABORTED): (503, "the request was aborted", "aborted"),
    int(RowStatus.UNRECOVERABLE): (502, "the request's state is lost and cannot be computed again", "unrecoverable"),
}


_ACTIVE = int(RowStatus.ACTIVE)
_EMPTY = len('""')
_ENDS = _REASONS.keys() | _BROKEN.keys()


def reason_of(view: RenderedStep, place: int) -> str | None:
    """Return the finish reason of a request's last row, None for any other row."""
    return _REASONS.get(view.statuses[place])


def broken(view: RenderedStep, place: int, tokens: int) -> ApiError | None:
    """Return the error that a row ends its request with, if it does."""
    found = _BROKEN.get(view.statuses[place])
    if found is None:
        return None
    status, message, code = found
    error = ApiError(status, f"{message} (after {tokens} tokens)", code=code)
    error.tokens = tokens
    return error


EmitJson = Callable[["Choice", bytes, RenderedStep, int], None]


class Sink(Protocol):
    """An answer, as its choices see it."""

    emit_json: "EmitJson | None"
    """Adds a row that does not end its choice, by its text as a JSON string; None: by `emit` alone."""

    def emit(self, choice: "Choice", text: str, pieces: list[Piece], produced_at_ns: int) -> None:
        """Add a row's text and pieces; the last row sets the choice's `reason`."""

    def end(self, error: ApiError) -> None:
        """End with an error."""


class Choice:
    """One choice of an answer."""

    __slots__ = (
        *("_emit_json", "_is_silent", "_shows_special", "_sink", "_stop", "_stops", "_text"),
        *("ending", "index", "parts", "reason", "tokens"),
    )

    def __init__(self, index: int, stopping: Stopping, parts: Sequence[Part], sink: Sink) -> None:
        self.index = index
        self.parts = parts
        self.tokens = 0
        self.reason: str | None = None
        """The finish reason, once it has ended."""
        self.ending: Ending | None = None
        """The same, and by which stop."""
        self._stops = stopping.texts
        self._shows_special = stopping.shows_special
        self._stop: int | str | None = None
        """The stop that ended it, as its worker says."""
        self._text = RunningText(stopping)
        self._sink = sink
        # Without stops and special tokens a row's text is that of its tokens, unless bytes of a character wait.
        self._emit_json = None if self._stops or self._shows_special else sink.emit_json
        # A row whose text is held back emits nothing, unless its tokens are shown beside the text.
        self._is_silent = all(part.is_empty for part in parts)

    def take(self, view: RenderedStep, place: int) -> bool:
        """Add a row; return whether more are wanted."""
        emit_json = self._emit_json
        if emit_json is not None and view.statuses[place] == _ACTIVE and not self._text.is_split:
            text_json = view.said[place]
            if len(text_json) > _EMPTY:
                self.tokens += view.counts[place]
                emit_json(self, text_json, view, place)
                return True
        count = view.counts[place]
        stop = view.stops.get(place, 0) if view.stops else 0
        text = ""
        if count and (self._stops or stop or self._shows_special):
            text, count = self._add_until_stop(view, place, stop)
        elif count:
            text = self._text.add(view.data(place))
        self.tokens += count
        if view.statuses[place] in _ENDS:
            error = broken(view, place, self.tokens)
            if error is not None:
                self._sink.end(error)
                return False
            self.reason = reason_of(view, place)
        if self._text.is_stopped:
            self.reason = "stop"
        if self.reason is not None:
            text += self._text.end()
            self.ending = self.reason, self._stop if self._text.stop is None else self._text.stop
        if self.reason is not None or text or (count and not self._is_silent):
            taken = [part.take(view, place, count) for part in self.parts]
            self._sink.emit(self, text, taken, view.produced_at_ns)
        return self.reason is None

    def end(self, error: ApiError) -> None:
        """End with an error."""
        error.tokens = self.tokens
        self._sink.end(error)

    def _add_until_stop(self, view: RenderedStep, place: int, stop: int) -> tuple[str, int]:
        """Add a row's tokens up to the one that completes a stop; return the text, and how many tokens those are.

        `stop` is the one that the worker names. A stop text is looked for here too: only the text says where it begins.
        """
        ids = view.row_ids(place)
        pieces = view.vocabulary.special_pieces if self._shows_special else view.vocabulary.pieces
        # Where no stop of the request's own ended it, its last token is the model's own end token.
        is_end = self._shows_special and not stop and view.statuses[place] == _STOPPED
        hides_last = (is_end or stop == STOP_TOKEN) and not self._text.includes_stop
        text, count = self._text.add_until_stop(pieces[token] for token in (ids[:-1] if hides_last else ids))
        if (stop or hides_last) and not self._text.is_stopped:
            self._stop, count = stop_of(view.batch, place, self._stops), len(ids)
        return text, count
