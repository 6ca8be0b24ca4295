"""Stopping: where a request's own stop tokens and stop strings end it."""

from collections.abc import Iterable, Sequence

from tokenbus_engines.ngram.tokenizer import Tokenizer


class Stopping:
    """Watches one request's output. A stop string may begin in one token and end in another."""

    __slots__ = ("_strings", "_tail", "_tail_size", "_token_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, strings: Iterable[str], token_ids: Iterable[int]) -> None:
        """Take what ends the request."""
        self._tokenizer = tokenizer
        self._strings = [text.encode() for text in strings]
        self._token_ids = frozenset(token_ids)
        self._tail_size = max((len(text) - 1 for text in self._strings), default=0)
        self._tail = b""

    def place_of_end(self, token_ids: Sequence[int]) -> int | None:
        """Take the next tokens, and return which of them completes a stop, if one does."""
        for place, token_id in enumerate(token_ids):
            if token_id in self._token_ids:
                return place
            if self._strings:
                text = self._tail + self._tokenizer.token_bytes(token_id)
                if any(stop in text for stop in self._strings):
                    return place
                self._tail = text[len(text) - self._tail_size :] if self._tail_size < len(text) else text
        return None
