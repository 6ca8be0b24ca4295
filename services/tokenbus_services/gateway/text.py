"""RunningText: a choice's tokens as text, with characters that are split over tokens, and stops that are cut off."""

import codecs
from collections.abc import Iterable, Sequence

_UTF8 = codecs.getincrementaldecoder("utf-8")


class RunningText:
    """Takes tokens' bytes, and gives the text that is certain: whole characters, and no beginning of a stop."""

    __slots__ = ("_decoder", "_held", "_is_split", "_stops", "is_stopped")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """Take the texts that end it where they appear."""
        self._decoder = _UTF8("replace")
        self._is_split = False
        self._stops = stops
        self._held = ""
        self.is_stopped = False
        """Whether a stop has appeared; what follows is none of this text."""

    def add(self, data: bytes) -> str:
        """Take bytes, and return the text that they bring."""
        if not self._is_split:
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = self._decode(data)
        else:
            text = self._decode(data)
        return self._certain(text) if self._stops else text

    def add_until_stop(self, pieces: Iterable[bytes]) -> tuple[str, int]:
        """Take tokens' bytes one by one up to the one that completes a stop; return the text, and how many were taken.

        What `add` gives of all of them together is the same text: this tells where the stop was complete.
        """
        texts, taken = [], 0
        for piece in pieces:
            texts.append(self.add(piece))
            taken += 1
            if self.is_stopped:
                break
        return "".join(texts), taken

    def end(self) -> str:
        """Return what was held back: the end of the text."""
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
    """Return how many of a text's last characters may be the beginning of a stop."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
