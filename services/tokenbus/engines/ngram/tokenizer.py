"""Tokenizer: between text and token ids, losing nothing."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

CHUNKS = re.compile(r" ?[^\W\d_]+|\n+| ?.", re.DOTALL)
"""A word or a sign, with the space before it; whatever else there is, one character at a time."""
BYTES = 256
COMMITTED = Path(__file__).with_name("model.npz")
"""What `python -m tests.engines.ngram.training` wrote."""


class Tokenizer:
    """Knows each token's bytes. Words of the training text are tokens; others are split into pieces, at last bytes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """Take the bytes of each token in the order of the ids; every single byte must be among them."""
        self._pieces = (*pieces, b"")
        self._ids = {piece: token_id for token_id, piece in enumerate(pieces)}
        missing = [byte for byte in range(BYTES) if bytes([byte]) not in self._ids]
        if missing:
            raise ValueError(f"pieces: all {BYTES} bytes, got none for {missing[0]}")
        sizes: list[set[int]] = [set() for _ in range(BYTES)]
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
        for chunk in CHUNKS.findall(text):
            data = chunk.encode()
            known = self._ids.get(data)
            if known is None:
                self._put_together(data, ids)
            else:
                ids.append(known)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which may be part of a character."""
        if not 0 <= token_id < len(self._pieces):
            raise ValueError(f"token id: below {len(self._pieces)}, got {token_id}")
        return self._pieces[token_id]

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


@cache
def default_tokenizer() -> Tokenizer:
    """Return the tokenizer of the model that comes with this package."""
    with np.load(COMMITTED) as file:
        data, ends = file["pieces"].tobytes(), file["piece_ends"].tolist()
    return Tokenizer([data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)])
