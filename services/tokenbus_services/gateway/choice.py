"""Choice: one request's rows as text, with characters that are split over tokens and stops, and what is beside it."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from tokenbus_contracts import RowStatus
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.logprob_writers import Part, Piece
from tokenbus_services.gateway.rendered_step import RenderedStep

_REASONS = {int(RowStatus.FINISHED_STOP): "stop", int(RowStatus.FINISHED_LENGTH): "length"}
_BROKEN = {
    int(RowStatus.ABORTED): (503, "the request was aborted", "aborted"),
    int(RowStatus.UNRECOVERABLE): (502, "the request's state is lost and cannot be computed again", "unrecoverable"),
}
_UTF8 = codecs.getincrementaldecoder("utf-8")


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


class Sink(Protocol):
    """An answer, as its choices see it."""

    def emit(self, choice: "Choice", text: str, pieces: list[Piece], produced_at_ns: int) -> None:
        """Add a row's text and pieces; the last row sets the choice's `reason`."""

    def end(self, error: ApiError) -> None:
        """End with an error."""


class Choice:
    """One choice of an answer."""

    __slots__ = ("_is_silent", "_sink", "_stops", "_text", "index", "parts", "reason", "tokens")

    def __init__(self, index: int, stops: Sequence[str], parts: Sequence[Part], sink: Sink) -> None:
        """Take its number, the stops, the parts beside the text, and the answer that it belongs to."""
        self.index = index
        self.parts = parts
        self.tokens = 0
        self.reason: str | None = None
        """The finish reason, once it has ended."""
        self._stops = bool(stops)
        self._text = RunningText(stops)
        self._sink = sink
        # A row whose text is held back emits nothing, unless its tokens are shown beside the text.
        self._is_silent = all(part.is_empty for part in parts)

    def take(self, view: RenderedStep, place: int) -> bool:
        """Add a row; return whether more are wanted."""
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
            self._sink.end(error)
            return False
        self.reason = "stop" if self._text.is_stopped else reason_of(view, place)
        if self.reason is not None:
            text += self._text.end()
        if self.reason is not None or text or (count and not self._is_silent):
            taken = [part.take(view, place, count) for part in self.parts]
            self._sink.emit(self, text, taken, view.produced_at_ns)
        return self.reason is None

    def end(self, error: ApiError) -> None:
        """End with an error."""
        error.tokens = self.tokens
        self._sink.end(error)


class RunningText:
    """Turns tokens' bytes into text, and holds back split characters and what may be the beginning of a stop."""

    __slots__ = ("_decoder", "_held", "_is_split", "_stops", "is_stopped")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """Take the stops: texts that end it where they appear."""
        self._decoder = _UTF8("replace")
        self._is_split = False
        self._stops = stops
        self._held = ""
        self.is_stopped = False
        """Whether a stop has appeared; later text is ignored."""

    def add(self, data: bytes) -> str:
        """Add bytes, and return the text that is complete."""
        if not self._is_split:
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = self._decode(data)
        else:
            text = self._decode(data)
        return self._certain(text) if self._stops else text

    def add_until_stop(self, pieces: Iterable[bytes]) -> tuple[str, int]:
        """Add tokens' bytes one by one until a stop is complete; return the text, and how many tokens it took.

        The text is the same that `add` returns for all of them together.
        """
        texts, taken = [], 0
        for piece in pieces:
            texts.append(self.add(piece))
            taken += 1
            if self.is_stopped:
                break
        return "".join(texts), taken

    def end(self) -> str:
        """Return what was held back, at the end."""
        if self.is_stopped:
            return ""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return text

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        self._is_split = bool(self._decoder.getstate()[0])
        return text

    def _certain(self, text: str) -> str:
        if self.is_stopped:
            return ""
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            self._held = ""
            return text[: min(places)]
        kept = max((_beginning(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _beginning(text: str, stop: str) -> int:
    """Return how many of a text's last characters may begin a stop."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
