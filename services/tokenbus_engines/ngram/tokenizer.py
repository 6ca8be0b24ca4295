"""Tokenizer: between text and token ids, losing nothing."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files

_CHUNKS = re.compile(r" ?[^\W\d_]+|\n+| ?.", re.DOTALL)
"""A word or a sign, with the space before it; whatever else there is, one character at a time."""
_LETTER_GROUPS = 400
_LONGEST_GROUP = 4
_BYTES = 256


class Tokenizer:
    """Knows each token's bytes. Words of the training text are tokens; others are split into pieces, at last bytes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """Take the bytes of each token in the order of the ids; every single byte must be among them."""
        self._pieces = (*pieces, b"")
        self._ids = {piece: token_id for token_id, piece in enumerate(pieces)}
        missing = [byte for byte in range(_BYTES) if bytes([byte]) not in self._ids]
        if missing:
            raise ValueError(f"pieces: all {_BYTES} bytes, got none for {missing[0]}")
        self._longest = max(map(len, pieces))
        sizes: list[set[int]] = [set() for _ in range(_BYTES)]
        for piece in pieces:
            sizes[piece[0]].add(len(piece))
        self._sizes = [sorted(each, reverse=True) for each in sizes]
        """How long the pieces are that begin with each byte, the longest first."""

    @property
    def vocabulary_size(self) -> int:
        """How many token ids there are."""
        return len(self._pieces)

    @property
    def end_token(self) -> int:
        """The token that ends a text; it has no bytes."""
        return len(self._pieces) - 1

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens."""
        ids: list[int] = []
        for chunk in _CHUNKS.findall(text):
            data = chunk.encode()
            known = self._ids.get(data)
            if known is None:
                self._put_together(data, ids)
            else:
                ids.append(known)
        return ids

    def least_tokens(self, size: int) -> int:
        """Return how many tokens a text of so many bytes has at least."""
        return -(-size // self._longest)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which may be part of a character."""
        if not 0 <= token_id < len(self._pieces):
            raise ValueError(f"token id: below {len(self._pieces)}, got {token_id}")
        return self._pieces[token_id]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of tokens; bytes that are no characters become replacement characters."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def _put_together(self, data: bytes, ids: list[int]) -> None:
        """Add the tokens of a chunk that is none: always the longest that fits."""
        begin = 0
        while begin < len(data):
            for size in self._sizes[data[begin]]:
                piece = data[begin : begin + size]
                if piece in self._ids:
                    break
            ids.append(self._ids[piece])
            begin += len(piece)


def learned(texts: Iterable[str]) -> Tokenizer:
    """Return the tokenizer of some texts: their words, the commonest groups of letters, and all bytes.

    The more frequent a token, the lower its id.
    """
    counts = Counter(chunk.encode() for text in texts for chunk in _CHUNKS.findall(text))
    groups: Counter[bytes] = Counter()
    for word in counts:
        for begin in range(len(word)):
            for end in range(begin + 2, min(len(word), begin + _LONGEST_GROUP) + 1):
                groups[word[begin:end]] += end - begin - 1
    for group, _ in sorted(groups.items(), key=lambda item: (-item[1], item[0]))[:_LETTER_GROUPS]:
        counts.setdefault(group, 0)
    for byte in range(_BYTES):
        counts.setdefault(bytes([byte]), 0)
    # Those that never occur come last, the longer first: they spell what is likelier.
    return Tokenizer(sorted(counts, key=lambda piece: (-counts[piece], -len(piece), piece)))


@cache
def default_tokenizer() -> Tokenizer:
    """Return the tokenizer of the text that comes with this package."""
    return learned(documents())


def documents() -> list[str]:
    """Return the texts of this package, short prose and talk written for it: a line for each paragraph."""
    folder = files("tokenbus_engines") / "ngram" / "text"
    sources = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".txt")), key=lambda entry: entry.name)
    texts = [part for source in sources for part in source.read_text("utf-8").split("\n---\n")]
    return ["\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n")) for text in texts]
