"""Requests: what a message asks of the paddle engine, and what ends a request."""

from typing import Any

from tests.engines.paddle.driver import text_request, token_request
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_engines.admission import parameters_of
from tokenbus_engines.paddle import ByteTokenizer, PaddleOptions
from tokenbus_engines.paddle.tokenizer import BEGIN, END
from tokenbus_engines.requests import Request

OPTIONS = PaddleOptions(context=16, max_top_logprobs=5)


def request_of(generate: Generate) -> Request:
    """Return the request that a message asks for."""
    return parameters_of(generate, OPTIONS, ByteTokenizer(), Request)


def of_text(text: str = "ab", **fields: Any) -> Request:  # noqa: ANN401 - as the message has them
    return request_of(text_request(7, text, **fields))


def test_prompts_become_tokens() -> None:
    """A text begins with a token of its own and goes on as UTF-8; token ids are taken as they are, 0 too (case 10)."""
    assert of_text("aé").prompt == [BEGIN, 97, 0xC3, 0xA9]
    assert request_of(token_request(7, [0, 257, 0])).prompt == [0, 257, 0]


def test_output_is_as_long_as_asked_for_or_as_fits() -> None:
    """A request ends after as many tokens as it asks for, and at the latest where its slot is full."""
    assert of_text("ab", max_tokens=5).most == 5
    assert of_text("ab", max_tokens=500).most == 13
    without = text_request(7, "ab")
    without.sampling.ClearField("max_tokens")
    assert request_of(without).most == 13


def test_absent_options_have_defaults() -> None:
    """What is absent is temperature 1, every token, no logprobs, and a seed drawn for each request alone."""
    first, second = of_text(), of_text()
    assert (first.temperature, first.top_p, first.top_k, first.is_scored, first.is_seeded) == (1, 1, 0, False, False)
    assert first.seed != second.seed
    assert of_text(seed=0).seed == 0
    assert of_text(seed=0).is_seeded


def stops_at(tokens: bytes, **fields: Any) -> list[bool]:  # noqa: ANN401 - as the message has them
    """Return of each token whether it completes a stop."""
    stops = of_text(**fields).stops
    assert stops is not None
    return [stops.take([token]) is not None for token in tokens]


def test_stop_text_ends_a_request_with_its_last_byte() -> None:
    """A stop text ends the request wherever its bytes were cut into tokens, and not before it is complete."""
    assert stops_at("nné!".encode(), stop=["né!", "zz"]) == [False, False, False, False, True]


def test_token_that_is_no_byte_does_not_part_a_stop_text() -> None:
    stops = of_text(stop=["ab"]).stops
    assert stops is not None
    assert [stops.take([token]) for token in (97, END, 98)] == [None, None, 0]


def test_only_the_end_of_the_text_is_kept() -> None:
    """A long output is not kept twice: no more bytes of it than a stop text can have."""
    stops = of_text(stop=["x" * 256]).stops
    assert stops is not None
    assert all(stops.take([97]) is None for _ in range(1000))
    assert len(stops.tail) == 255
    assert [stops.take([ord("x")]) for _ in range(256)] == [None] * 255 + [0]


def test_stop_tokens_complete_a_stop() -> None:
    """A request's own stop tokens end it where asked for, the end token and token 0 too, and no other by mistake."""
    assert of_text().stops is None
    for token in (END, 0):
        stops = of_text(stop_token_ids=[token]).stops
        assert stops is not None
        assert [stops.take([each]) for each in (97, token)] == [None, 0]
