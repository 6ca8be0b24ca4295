"""ByteTokenizer: between text and token ids, losing nothing."""

from collections.abc import Iterable

BEGIN = 256
"""Stands before every text."""
END = 257
"""Ends a text."""
VOCABULARY_SIZE = 258
"""The bytes, and the two above."""


class ByteTokenizer:
    """Each byte is a token; two more stand for the beginning and the end of a text."""

    vocabulary_size = VOCABULARY_SIZE
    """How many token ids there are."""
    end_token = END
    """The token that ends a text; it has no bytes."""

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens: that of its beginning, and its bytes."""
        return [BEGIN, *text.encode()]

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which may be part of a character."""
        if not 0 <= token_id < VOCABULARY_SIZE:
            raise ValueError(f"token id: below {VOCABULARY_SIZE}, got {token_id}")
        return bytes([token_id]) if token_id < BEGIN else b""

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of tokens; bytes that are no characters become replacement characters."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")
