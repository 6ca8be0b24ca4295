"""Tokenizer: lossless conversion between text and token ids."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

CHUNKS = re.compile(r" ?[^\W\d_]+|\n+| ?.", re.DOTALL)
"""Pattern of a word or a character with the space before it, or a run of newlines."""
BYTES = 256
COMMITTED = Path(__file__).with_name("model.npz")
"""File that `python -m tests.engines.ngram.training` writes."""


class Tokenizer:
    """A tokenizer with one token per word of the training text. Other words are split into pieces or bytes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """Create a tokenizer from the tokens' bytes in the order of their ids. Every single byte must be a token."""
        self._pieces = (*pieces, b"")
        self.vocabulary_size, self.end_token = len(self._pieces), len(pieces)
        self._ids = {piece: token_id for token_id, piece in enumerate(pieces)}
        missing = [byte for byte in range(BYTES) if bytes([byte]) not in self._ids]
        if missing:
            raise ValueError(f"pieces: all {BYTES} bytes, got none for {missing[0]}")
        sizes: list[set[int]] = [set() for _ in range(BYTES)]
        for piece in pieces:
            sizes[piece[0]].add(len(piece))
        self._sizes = [sorted(each, reverse=True) for each in sizes]
        """Lengths of the pieces that begin with each byte, in descending order."""

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for chunk in CHUNKS.findall(text):
            data = chunk.encode()
            known = self._ids.get(data)
            if known is None:
                self._split(data, ids)
            else:
                ids.append(known)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which may be an incomplete character."""
        if not 0 <= token_id < len(self._pieces):
            raise ValueError(f"token id: below {len(self._pieces)}, got {token_id}")
        return self._pieces[token_id]

    def _split(self, data: bytes, ids: list[int]) -> None:
        """Split a chunk greedily, taking the longest piece each time."""
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
    with np.load(COMMITTED) as file:
        data, ends = file["pieces"].tobytes(), file["piece_ends"].tolist()
    return Tokenizer([data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)])
