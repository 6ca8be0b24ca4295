"""ByteTokenizer: between text and token ids, losing nothing."""

BEGIN = 256
END = 257
VOCABULARY_SIZE = 258


class ByteTokenizer:
    """Each byte is a token; two more stand for the beginning and the end of a text."""

    vocabulary_size = VOCABULARY_SIZE
    end_token = END

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens: that of its beginning, and its bytes."""
        return [BEGIN, *text.encode()]

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which may be part of a character."""
        if not 0 <= token_id < VOCABULARY_SIZE:
            raise ValueError(f"token id: below {VOCABULARY_SIZE}, got {token_id}")
        return bytes([token_id]) if token_id < BEGIN else b""
