"""PaddleEngine: what each request gets, whatever else the engine does."""

from typing import Any

import numpy as np
import pytest

from tests.engines.paddle.needs import NEEDS_PADDLE
from tests.engines.runs import asked, paddle, text_of, tokens_alone
from tokenbus.engines.paddle import ByteTokenizer
from tokenbus_contracts import RowStatus, SpeculativeMethod
from tokenbus_contracts.generated.request_pb2 import Generate

pytestmark = NEEDS_PADDLE

STORY = "It was raining. That morning Clara was at the bakery again. "
MIXED: list[Generate] = [
    asked(1, STORY, max_tokens=40, temperature=0.0),
    asked(2, "One day in winter Ben went to ", 4, max_tokens=20, seed=5),
    asked(3, STORY * 3, max_tokens=12, seed=6, temperature=1.5, top_k=9),
    asked(4, [0, 0, 7], 0, include_draft_logprobs=True, max_tokens=15, seed=7, top_p=0.8),
    asked(5, "x", max_tokens=30, seed=8, stop=["the"]),
]


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    return {generate.request_id: tokens_alone(paddle().engine, generate) for generate in MIXED}


@pytest.mark.parametrize(
    ("order", "shared"),
    [
        ([4, 1, 0, 3, 2], {"max_running": 4, "slice_steps": 0, "prefill_chunk": 16}),
        ([0, 1, 2, 3, 4], {"max_running": 2, "slice_steps": 3, "prefill_chunk": 50}),
        ([2, 4, 3, 1, 0], {"max_running": 1, "slice_steps": 6, "prefill_chunk": 256}),
    ],
)
def test_nothing_of_the_others_changes_a_request(
    alone: dict[int, list[int]], order: list[int], shared: dict[str, int]
) -> None:
    """However requests come, and however slots and steps are shared, each one's tokens are its own (cases 15, 22)."""
    run = paddle(**shared)
    for steps, place in enumerate(order):
        run.admit(MIXED[place])
        for _ in range(steps):
            run.step()
    run.to_the_end()
    assert {key: got.tokens for key, got in run.got.items()} == alone


def test_steps_give_what_was_accepted_and_one_more() -> None:
    run = paddle([MIXED[0]]).to_the_end()
    first, *others = run.got[1].rows
    assert (first.token_ids.size, first.draft_token_count, first.proposal_token_ids.size) == (1, 0, 3)
    for row in others:
        assert 1 <= row.token_ids.size <= row.draft_token_count + 1
        assert row.proposal_token_ids.size == 0
    assert {row.draft_token_count for row in others[:-1]} == {3}
    assert {batch.header.method for (batch,) in run.batches} == {SpeculativeMethod.MTP}
    assert len(others) < 24


def test_engine_without_proposer_works(alone: dict[int, list[int]]) -> None:
    """Without speculation every step gives one token, and the greedy ones are the same as with it (case 31)."""
    run = paddle([MIXED[0]], speculate=0).to_the_end()
    assert [row.token_ids.size for row in run.got[1].rows] == [1] * 40
    assert {batch.header.method for (batch,) in run.batches} == {SpeculativeMethod.NONE}
    assert run.got[1].tokens == alone[1]


def test_end_of_a_story_ends_a_request_unless_it_is_ignored() -> None:
    ending: dict[str, Any] = {"prompt": STORY + "And that was the end", "max_tokens": 60, "temperature": 0.0}
    run = paddle([asked(1, **ending), asked(2, **ending, ignore_end_token=True)]).to_the_end()
    ended, ignored = run.got[1], run.got[2]
    assert (text_of(ByteTokenizer(), ended.tokens), ended.tokens[-1]) == (" of it.", 257)
    assert (ended.statuses[-1], ignored.statuses[-1]) == (RowStatus.FINISHED_STOP, RowStatus.FINISHED_LENGTH)
    assert ignored.tokens[:8] == ended.tokens


def test_slot_is_filled_to_its_last_token() -> None:
    run = paddle([asked(1, list(b"One day "), seed=1, ignore_end_token=True)], context=40).to_the_end()
    assert len(run.got[1].tokens) == 32
    assert run.got[1].statuses[-1] is RowStatus.FINISHED_LENGTH


def test_what_is_no_number_ends_its_own_request(alone: dict[int, list[int]]) -> None:
    """A request whose numbers went wrong ends alone, and the next request in its slot is not affected (case 24)."""
    run = paddle(MIXED[:2], max_running=2)
    run.step()
    engine: Any = run.engine
    cache, place = engine._runner.cache, int(engine._requests.places[engine._requests.slot(2)])
    cache._keys[0][place * cache._heads * cache._context] = np.nan
    run.step()
    assert run.got[2].statuses == [RowStatus.ACTIVE, RowStatus.UNRECOVERABLE]
    run.admit(MIXED[3])
    run.to_the_end()
    assert run.got[1].tokens == alone[1]
    assert run.got[4].tokens == alone[4]
    engine.close()
    assert not hasattr(engine, "_runner")
