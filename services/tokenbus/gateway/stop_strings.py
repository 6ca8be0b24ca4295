"""RunningText: the text of arriving tokens up to a stop string. Tokens may split characters."""

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_UTF8 = codecs.getincrementaldecoder("utf-8")
REPLACEMENT = "\ufffd"


class Stopping(NamedTuple):
    """The stop texts of a request, and the rules for applying them."""

    texts: Sequence[str] = ()
    min_tokens: int = 0
    """Number of tokens at the beginning of an answer in which stop texts are ignored."""
    is_included: bool = False
    shows_special: bool = False


class RunningText:
    """Decodes the bytes of tokens, and holds back split characters and possible beginnings of a stop text.

    Bytes that are not UTF-8 become replacement characters when further text follows. At the end of the text, such bytes
    count as a split character, which is omitted as in vLLM.
    """

    __slots__ = ("_broken", "_decoder", "_held", "_least", "_stops", "_tokens", "includes_stop", "is_split", "stop")

    def __init__(self, stopping: Stopping | None = None) -> None:
        self._decoder = _UTF8("replace")
        self.is_split = False
        """Whether the text ends within a character, which the next bytes may complete."""
        self._broken = 0
        """Number of replacement characters that are held back at the end."""
        self._stops = () if stopping is None else stopping.texts
        self._least = 0 if stopping is None else stopping.min_tokens
        self._tokens = 0
        self._held = ""
        self.includes_stop = stopping is not None and stopping.is_included
        self.stop: str | None = None

    def add(self, data: bytes) -> str:
        if not self.is_split:
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = self._decode(data)
            else:
                if text.endswith(REPLACEMENT):
                    text = self._decode(data)
        else:
            text = self._decode(data)
        return self._certain(text) if self._stops else text

    def add_until_stop(self, pieces: Iterable[bytes]) -> tuple[str, int]:
        """Add tokens until a stop text is complete. Return the text and the number of added tokens.

        The text is the same as if `add` received the bytes of these tokens at once.
        """
        texts, taken = [], 0
        for piece in pieces:
            self._tokens += 1
            texts.append(self.add(piece))
            taken += 1
            if self.stop is not None:
                break
        return "".join(texts), taken

    def end(self) -> str:
        if self.stop is not None:
            return ""
        text, self._held = self._held, ""
        return text

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        certain = text.rstrip(REPLACEMENT)
        broken = len(text) - len(certain)
        if certain:
            certain, self._broken = REPLACEMENT * self._broken + certain, broken
        else:
            self._broken += broken
        self.is_split = bool(self._broken or self._decoder.getstate()[0])
        return certain

    def _certain(self, text: str) -> str:
        if self.stop is not None:
            return ""
        before, text = len(self._held), self._held + text
        ends = [] if self._least and self._tokens <= self._least else self._ends(text, before)
        if ends:
            end, number = min(ends)
            self.stop = self._stops[number]
            self._held = ""
            return text[:end] if self.includes_stop else text[: end - len(self.stop)]
        kept = max((beginning(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _ends(self, text: str, before: int) -> list[tuple[int, int]]:
        """Return the end and the index of each stop text that ends after the first `before` characters."""
        found = ((text.find(stop, max(0, before + 1 - len(stop))), stop) for stop in self._stops)
        return [(begin + len(stop), number) for number, (begin, stop) in enumerate(found) if begin >= 0]


def beginning(text: str, stop: str) -> int:
    """Return the number of characters at the end of `text` that may begin a stop text."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
