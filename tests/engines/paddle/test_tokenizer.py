"""ByteTokenizer: text to tokens and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.runs import text_of
from tokenbus.engines.paddle.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


@given(st.text())
def test_text_comes_back(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert text_of(TOKENIZER, [*tokens, TOKENIZER.end_token]) == text
    assert all(token < TOKENIZER.vocabulary_size for token in tokens)


def test_token_has_its_byte() -> None:
    """A token below 256 is a byte, 0 too (case 10); an unknown id is an error."""
    assert [TOKENIZER.token_bytes(token) for token in (0, 255, 256, 257)] == [b"\0", b"\xff", b"", b""]
    assert TOKENIZER.encode("aé") == [256, 97, 0xC3, 0xA9]
    with pytest.raises(ValueError, match="token id: below 258, got 258"):
        TOKENIZER.token_bytes(258)
