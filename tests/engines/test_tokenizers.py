"""The demo engines' tokenizers: any text to tokens and back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.runs import text_of
from tokenbus.engines.ngram import Tokenizer, default_tokenizer
from tokenbus.engines.paddle.tokenizer import ByteTokenizer


@pytest.mark.long
@settings(max_examples=30)
@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    tokenizer = default_tokenizer()
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_words_that_are_no_tokens_are_spelled_by_the_longest_that_fit() -> None:
    tokenizer = Tokenizer([*(bytes([byte]) for byte in range(256)), b"ab", b"abcd", b"bc"])
    assert tokenizer.encode("abcdabcabbca") == [257, 256, ord("c"), 256, 258, ord("a")]


def test_token_zero_is_a_frequent_token() -> None:
    """The lowest ids belong to what is most frequent, so that id 0 is in every text (case 10); words are tokens."""
    assert len(default_tokenizer().encode("The old woman looks at the sea.")) == 8
    assert default_tokenizer().token_bytes(0) == b"."
    assert 0 in default_tokenizer().encode("It is here. It was there.")


def test_tokens_have_their_bytes() -> None:
    tokenizer = default_tokenizer()
    assert tokenizer.token_bytes(tokenizer.end_token) == b""
    for token_id in (-1, tokenizer.end_token + 1):
        with pytest.raises(ValueError, match=rf"^token id: below \d+, got {token_id}$"):
            tokenizer.token_bytes(token_id)


def test_a_tokenizer_needs_every_byte() -> None:
    with pytest.raises(ValueError, match=r"^pieces: all 256 bytes, got none for 7$"):
        Tokenizer([bytes([byte]) for byte in range(256) if byte != 7])


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
