"""Hand-off: a request goes on at another engine as if it had never left, or is refused by name."""

import json
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.paddle.needs import NEEDS_PADDLE
from tests.engines.runs import Run, asked, paddle, tokens_alone
from tests.engines.test_continuation import both, handed_on
from tokenbus.engines.paddle import PaddleEngine, PaddleOptions
from tokenbus.engines.paddle.network import Shape
from tokenbus_contracts import RowStatus

pytestmark = NEEDS_PADDLE

ASKED = asked(9, "abc", max_tokens=8)
STORY = "The wind was strong. That evening Leo was at the school again. "
REQUESTS = [
    asked(1, STORY, max_tokens=40, temperature=0.0, top_logprobs=2, include_draft_logprobs=True),
    asked(2, "One morning ", max_tokens=50, seed=1, top_logprobs=0),
    asked(3, STORY * 3, max_tokens=30, seed=2, temperature=1.4),
    asked(4, [0, 65], max_tokens=30, seed=3, top_k=20, stop=["e "]),
]


def fields_of(state: bytes) -> dict[str, Any]:
    """Return a state's fields, and what it carries."""
    line, _, carried = state.partition(b"\n")
    fields: dict[str, Any] = json.loads(line)
    return fields | {"carried": carried}


def state_of(fields: dict[str, Any]) -> bytes:
    others = {name: value for name, value in fields.items() if name != "carried"}
    carried: bytes = fields["carried"]
    return json.dumps(others).encode() + b"\n" + carried


@pytest.fixture
def prefilled() -> Run:
    """Return a prefill engine that handed everything off."""
    return paddle(REQUESTS, role="prefill", prefill_chunk=100).to_the_end()


def test_tokens_are_those_of_one_engine(prefilled: Run) -> None:
    """Also where all share one slot."""
    run = paddle(role="decode", max_running=1, slice_steps=4)
    for generate in REQUESTS:
        key = generate.request_key
        assert run.admit(generate, prefilled.states[key], prefilled.got[key]) > 0
    run.to_the_end()
    for generate in REQUESTS:
        got = run.got[generate.request_key]
        assert got.tokens == tokens_alone(paddle().engine, generate)
        assert got.statuses[-1] in {RowStatus.FINISHED_LENGTH, RowStatus.FINISHED_STOP}
    assert run.got[1].drafts[0].token_ids.tolist() == run.got[1].rows[0].proposal_token_ids.tolist()


def test_what_was_handed_over_is_kept_for_as_many_as_there_are_slots(prefilled: Run) -> None:
    """States that wait for a slot are bounded in number: beyond it a request is computed anew instead."""
    run = paddle(role="decode", max_running=2, slice_steps=0)
    for generate in REQUESTS:
        run.admit(generate, prefilled.states[generate.request_key])
    firsts: dict[int, int] = {}
    while run.engine.has_work:
        (arrays, *_) = run.engine.step()
        for key, status in zip(
            *(np.asarray(each).tolist() for each in (arrays.request_keys, arrays.statuses)), strict=True
        ):
            firsts.setdefault(key, status)
    assert firsts == {1: RowStatus.ACTIVE, 2: RowStatus.ACTIVE, 3: RowStatus.PREFILLING, 4: RowStatus.PREFILLING}


@cache
def decoding() -> PaddleEngine:
    """Return a decode engine, which stays as it is where a state is refused."""
    return PaddleEngine(PaddleOptions(role="decode", context=32))


@cache
def sound() -> dict[str, Any]:
    """Return the fields of a sound state of the request ASKED."""
    prefill = paddle([ASKED], role="prefill", context=32).to_the_end()
    return fields_of(prefill.states[9]) | {"seed": 2**64 - 1}


def refusal(state: bytes) -> str:
    """Return what is said of a state that is wrong."""
    with pytest.raises(ValueError, match=r"^state") as error:
        decoding().admit(ASKED, state)
    assert "\n" not in str(error.value)
    assert not decoding().has_work
    return str(error.value)


@pytest.mark.parametrize(("most", "drafts"), [(8, 3), (3, 1)])
def test_sound_state_is_taken_over(most: int, drafts: int) -> None:
    """No more drafts are verified than tokens are left, less the last, which needs none."""
    shape = Shape()
    assert len(sound()["carried"]) == 4 * (3 * 258 + 2 * shape.layers * 4 * shape.width)
    made = PaddleEngine(PaddleOptions(role="decode", context=32))
    assert made.admit(asked(9, "abc", max_tokens=most), state_of(sound())) == 4
    (target,) = made.step()
    assert (np.asarray(target.positions).tolist(), np.asarray(target.draft_token_counts).tolist()) == ([1], [drafts])


def test_state_that_is_wrong_is_named() -> None:
    carried: bytes = sound()["carried"]
    size, short = len(carried), carried[:-4]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"proposals": [0, 1, 2, 3]}, "proposals: at most 3, got 4"),
        ({"proposals": [0, 1]}, f"carried: {size - 4 * 258} bytes, as its tokens say, got {size}"),
        ({"carried": short}, f"carried: {size} bytes, as its tokens say, got {size - 4}"),
        ({"carried": short + np.float32(np.nan).tobytes()}, "carried: finite numbers up to 65504, got nan"),
        ({"carried": short + np.float32(7e4).tobytes()}, "carried: finite numbers up to 65504, got 70000.0"),
    ]
    for changed, said in changes:
        assert refusal(state_of(sound() | changed)) == f"state.{said}"
    assert refusal(bytes(10**6)).startswith("state: at most ")  # larger than a slot


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(min_value=0), st.integers(0, 255)), min_size=1, max_size=4), st.integers(min_value=0)
)
def test_damaged_state_is_refused_or_harmless(changes: list[tuple[int, int]], cut: int) -> None:
    """Whatever bytes come, the answer is a ValueError in one line, or a request as a sound state could make it."""
    state = bytearray(state_of(sound()))
    for place, byte in changes:
        state[place % len(state)] = byte
    try:
        decoding().admit(ASKED, bytes(state[: cut % (2 * len(state))]))
    except ValueError as error:
        assert re.fullmatch("state.*", str(error))  # noqa: PT017 - it may be sound
    if decoding().has_work:
        (target,) = decoding().step()
        assert RowStatus.UNRECOVERABLE not in np.asarray(target.statuses)
        decoding().abort(9)
        decoding().step()
    assert not decoding().has_work


@pytest.mark.parametrize("place", [0, 1])
def test_killed_engine_is_continued_by_another(place: int) -> None:
    for whole, parts in both(paddle, REQUESTS[place]):
        assert parts.tokens == whole.tokens
        assert np.allclose(parts.logprobs, whole.logprobs, rtol=0, atol=1e-4)
    cut = whole.rows[4].position
    got = handed_on(paddle, REQUESTS[place], whole.tokens[:cut])
    assert [token for row in got.rows for token in row.token_ids.tolist()] == whole.tokens[cut:]
