"""Which key a request of vLLM's has on the bus: the one that it chose, or one that its client can compute."""

import logging
from hashlib import sha256

import pytest

from tokenbus.engines.vllm import request_key
from tokenbus.engines.vllm.request_keys import ARGUMENT, RequestKeys

SUFFIX = "-0a1b2c3d"
"""As vLLM's front end adds it, at random, to the id that it knows."""


def test_any_language_can_compute_the_key() -> None:
    assert request_key("chatcmpl-42") == int(sha256(b"chatcmpl-42").hexdigest()[:16], 16)


def test_clients_know_the_key_by_the_answers_id() -> None:
    """`LLM.generate` counts from 0 in each process, so its requests are known by the random part, too."""
    for known in ("chatcmpl-42", "cmpl-42-0", "cmpl-42-11", "0_cmpl-42-0", "chatcmpl-a_b"):
        assert RequestKeys().key_of(known + SUFFIX, None) == request_key(known)
    for whole in ("cmpl-42-0", f"7{SUFFIX}", f"0_7{SUFFIX}"):
        assert RequestKeys().key_of(whole, {}) == request_key(whole)


def test_requests_choose_their_keys() -> None:
    last = 2**64 - 1
    for given in (7, "7", last, str(last)):
        assert RequestKeys().key_of("cmpl-1-0" + SUFFIX, {ARGUMENT: given}) == int(given)
    keys = RequestKeys()
    of_each = [keys.key_of(f"{number}_cmpl-1-0{SUFFIX}", {ARGUMENT: last - 1}) for number in range(3)]
    assert of_each == [last - 1, last, 1]


@pytest.mark.parametrize("given", [0, -1, 2**64, True, 1.5, "x", "\u0667", "9" * 400, None, [7]])
def test_wrong_keys_are_told_and_left(given: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert RequestKeys().key_of("cmpl-1-0" + SUFFIX, {ARGUMENT: given}) == request_key("cmpl-1-0")
    assert "request key refused" in caplog.text


def test_key_is_never_given_twice(caplog: pytest.LogCaptureFixture) -> None:
    keys = RequestKeys(most=4)
    name = "cmpl-1-0" + SUFFIX
    with caplog.at_level(logging.WARNING):
        given = [keys.key_of(name, {ARGUMENT: 7}) for _ in range(4)]
    assert given == [7, request_key("cmpl-1-0"), request_key(name), request_key(f"{name}#1")]
    assert "request key used before" in caplog.text
    assert keys.key_of("cmpl-2-0", None) == request_key("cmpl-2-0")
    assert keys.key_of("other", {ARGUMENT: 7}) == 7
