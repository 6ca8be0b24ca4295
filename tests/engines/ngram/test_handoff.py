"""Handoff: a prefill engine begins, a decode engine goes on, and nothing is lost, repeated or taken on trust."""

import json
from functools import cache
from typing import Any

import pytest

from tests.engines.runs import PROMPT, Run, asked, ngram
from tokenbus.engines.ngram import NgramEngine, NgramOptions, default_tokenizer
from tokenbus.worker.engine import Engine
from tokenbus_contracts import RowStatus, StepPhase
from tokenbus_contracts.generated.request_pb2 import Generate

DECODE = NgramOptions(role="decode")


def wanted(count: int) -> list[Generate]:
    """Return requests that differ in everything."""
    return [
        asked(
            key,
            PROMPT * (key % 3 + 1),
            (None, 0, 3, 20)[key % 4],
            seed=key,
            max_tokens=1 + key % 30,
            temperature=0.4 + key / 8,
            top_p=0.95,
            stop=["."] if key % 5 == 0 else [],
        )
        for key in range(1, count + 1)
    ]


def handed_off(requests: list[Generate], **options: int) -> tuple[Run, dict[int, bytes]]:
    """Let a prefill engine begin, and return what it hands off."""
    run = ngram(requests, role="prefill", **options).to_the_end()
    return run, run.states


def test_tokens_are_those_of_a_mixed_engine() -> None:
    """All requests of a prefill step go on elsewhere, and get what one engine alone would have given them (case 27)."""
    requests = wanted(24)
    prefill, states = handed_off(requests)
    mixed = ngram(requests).to_the_end()
    decode = ngram(role="decode")
    for request in requests:
        got = prefill.got[request.request_key]
        if got.statuses[-1] is RowStatus.HANDED_OFF:
            decode.admit(request, states[request.request_key], got)
    assert len(states) > 15
    decode.to_the_end()
    for key, whole in mixed.got.items():
        got = prefill.got[key]  # the decode engine went on with it
        assert (got.tokens, got.logprobs, got.ranks) == (whole.tokens, whole.logprobs, whole.ranks)
        assert got.alternatives == whole.alternatives
        assert got.statuses[-1] is whole.statuses[-1]
    assert {batch.header.phase for (batch,) in decode.batches} == {StepPhase.DECODE}


def test_the_first_token_comes_with_proposals() -> None:
    """A row that is handed off has one token with its logprobs, and what the draft proposes to follow it (case 27)."""
    requests = [
        asked(1, top_logprobs=2, seed=1, max_tokens=9),
        asked(2, seed=2, max_tokens=9, include_draft_logprobs=True),
    ]
    prefill, states = handed_off(requests, prefill_chunk=5)
    for key, got in prefill.got.items():
        row = got.rows[-1]  # before it, the second prompt's first chunk
        assert (row.status, row.token_ids.size, row.proposal_token_ids.size) == (RowStatus.HANDED_OFF, 1, 3)
        state = json.loads(states[key])
        assert (state["tokens"], state["proposals"]) == (got.tokens, row.proposal_token_ids.tolist())
    assert len(prefill.got[1].alternatives[0]) == 2
    assert prefill.batches[0][0].header.phase is StepPhase.PREFILL
    assert not prefill.engine.has_work
    decode = ngram(role="decode")
    decode.admit(requests[1], states[2], prefill.got[2])
    decode.step()
    assert decode.got[2].rows[-1].draft_token_count == 3  # and the decode engine verifies these first
    assert decode.got[2].drafts[0].token_ids.tolist() == row.proposal_token_ids.tolist()


def test_a_seed_that_was_drawn_goes_along() -> None:
    """A request that asks for no seed goes on with the one that the prefill engine drew, another with its own."""
    state = handed_off([asked(1, max_tokens=20)])[1][1]
    cases: list[tuple[dict[str, Any], int]] = [({}, json.loads(state)["seed"]), ({"seed": 5}, 5)]
    for sampling, seed in cases:
        run = ngram(role="decode")
        run.admit(asked(1, max_tokens=20, **sampling), state)
        requests = run.engine._requests
        assert requests.seeds[requests.slot(1)] == seed


def test_a_first_token_that_ends_a_request_is_no_handoff() -> None:
    first = ngram([asked(2, seed=2)]).to_the_end().got[2].tokens[0]
    run, states = handed_off([asked(1, max_tokens=1), asked(2, seed=2, stop_token_ids=[first])])
    assert run.got[1].statuses == [RowStatus.FINISHED_LENGTH]
    assert run.got[2].statuses == [RowStatus.FINISHED_STOP]
    assert states == {}


def test_a_handed_off_request_may_be_preempted() -> None:
    """A request that went on elsewhere and is taken out there still gets a mixed engine's tokens (case 22)."""
    generate, other = (asked(key, seed=6, max_tokens=30, ignore_end_token=True) for key in (1, 2))
    prefill, states = handed_off([generate, other])
    decode = ngram(role="decode", max_running=1, slice_steps=2)
    decode.admit(generate, states[1], prefill.got[1])
    decode.admit(other, states[2], prefill.got[2])
    got = decode.to_the_end().got[1]
    assert RowStatus.PREEMPTED in got.statuses
    assert got.tokens == ngram([generate]).to_the_end().got[1].tokens


@cache
def sound() -> bytes:
    return handed_off([asked(1, seed=1, max_tokens=9)])[1][1]


def state_with(carried: str = "", **changes: Any) -> bytes:  # noqa: ANN401 - whatever JSON has
    """Return a state that is right but for these changes; None takes a field out."""
    fields = json.loads(sound()) | changes
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode() + carried.encode()


DAMAGED = {
    "state: JSON is malformed: invalid character": b"\xff\xfe",
    "state: at most 65536 bytes, got 70000": b" " * 70_000,
    "state: Object missing required field `seed`": {"seed": None},
    "state: Object contains unknown field `more`": {"more": 1},
    "state.model: .*, got 'other'": {"model": "other"},
    "state.prompt: the request's own, got another": {"prompt": "other"},
    r"state: Expected `array` of length >= 1 - at `\$.tokens`": {"tokens": []},
    r"state: Expected `array` of length <= 16 - at `\$.tokens`": {"tokens": [1] * 17},
    r"state: Expected `int`, got `bool` - at `\$.tokens\[0\]`": {"tokens": [True]},
    r"state.tokens\[0\]: below \d+, got 100000": {"tokens": [100_000]},
    "state.tokens: less than the 9 of the request, got 9": {"tokens": [1] * 9},
    "state.tokens: none that ends the request, got the end token": {"tokens": [default_tokenizer().end_token]},
    "state.tokens: none that ends the request, got one that does": {"tokens": [77]},
    "state.seed: below 18446744073709551616, got 18446744073709551616": {"seed": 2**64},
    r"state.proposals\[0\]: below \d+, got 100000": {"proposals": [100_000]},
    "state.carried: nothing, got 3 bytes": {"carried": "\nabc"},
}


@pytest.mark.parametrize(("message", "made"), DAMAGED.items(), ids=range(len(DAMAGED)))
def test_a_damaged_state_is_refused(message: str, made: Any) -> None:  # noqa: ANN401 - bytes, or changes
    state = made if isinstance(made, bytes) else state_with(**made)
    engine = NgramEngine(DECODE)
    with pytest.raises(ValueError, match=message) as error:
        engine.admit(asked(1, seed=1, max_tokens=9, stop_token_ids=[77]), state)
    assert "\n" not in str(error.value)
    assert not engine.has_work


def test_roles_want_their_own_requests() -> None:
    state = state_with()
    with pytest.raises(ValueError, match=r"^state: a decode engine goes on from a prefill engine's, got none$"):
        NgramEngine(DECODE).admit(asked(1))
    with pytest.raises(ValueError, match=r"^state: none for a prefill engine, got one$"):
        NgramEngine(NgramOptions(role="prefill")).admit(asked(1), state)
    mixed: Engine = NgramEngine()
    assert mixed.admit(asked(1, max_tokens=9), state) == 4
