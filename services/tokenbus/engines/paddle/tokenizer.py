"""ByteTokenizer: one token per byte."""

BEGIN = 256
END = 257
VOCABULARY_SIZE = 258


class ByteTokenizer:
    """A tokenizer of bytes, with a begin and an end token."""

    vocabulary_size = VOCABULARY_SIZE
    end_token = END

    def encode(self, text: str) -> list[int]:
        """Return the begin token and the text's bytes."""
        return [BEGIN, *text.encode()]

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which may be an incomplete character."""
        if not 0 <= token_id < VOCABULARY_SIZE:
            raise ValueError(f"token id: below {VOCABULARY_SIZE}, got {token_id}")
        return bytes([token_id]) if token_id < BEGIN else b""
