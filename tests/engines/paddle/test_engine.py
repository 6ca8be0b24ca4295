"""PaddleEngine: what each request gets, whatever else the engine does."""

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.paddle.driver import Run, text_request, token_request, tokens_alone
from tests.engines.paddle.needs import NEEDS_PADDLE
from tokenbus_contracts import RowStatus, SpeculativeMethod, StepPhase
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_engines.paddle import PaddleEngine, PaddleOptions
from tokenbus_engines.paddle.decoder import PaddleDecoder
from tokenbus_services.worker.engine import Engine

pytestmark = NEEDS_PADDLE

STORY = "It was raining. That morning Clara was at the bakery again. "
MIXED: list[Generate] = [
    text_request(1, STORY, 40, temperature=0.0),
    text_request(2, "One day in winter Ben went to ", 30, seed=5, top_logprobs=4),
    text_request(3, STORY * 3, 20, seed=6, temperature=1.5, top_k=9),
    token_request(4, [0, 0, 7], 25, seed=7, top_p=0.8, top_logprobs=0, include_draft_logprobs=True),
    text_request(5, "x", 50, seed=8, stop=["the"]),
]


def engine(**options: Any) -> PaddleEngine:  # noqa: ANN401 - each option's own
    """Return an engine with the committed weights."""
    return PaddleEngine(PaddleOptions(**{"context": 512, "max_running": 8} | options))


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    """Return what each of the mixed requests gets from an engine of its own."""
    return {generate.request_key: tokens_alone(engine(), generate) for generate in MIXED}


def test_neighbours_change_nothing(alone: dict[int, list[int]]) -> None:
    """A request gets the same tokens alone and among others that ask for anything else (case 15)."""
    run = Run(engine())
    for generate in MIXED:
        assert run.engine.admit(generate) > 0
    run.to_the_end()
    assert {key: got.tokens for key, got in run.got.items()} == alone


@settings(max_examples=12)
@given(
    st.permutations(MIXED),
    st.lists(st.integers(0, 3), min_size=len(MIXED), max_size=len(MIXED)),
    st.fixed_dictionaries(
        {
            "max_running": st.integers(1, 4),
            "slice_steps": st.integers(0, 6),
            "prefill_chunk": st.sampled_from([16, 50, 256]),
        }
    ),
)
def test_nothing_of_the_others_changes_a_request(
    alone: dict[int, list[int]], order: list[Generate], waits: list[int], shared: dict[str, int]
) -> None:
    """However requests come, and however slots and steps are shared, each one's tokens are its own (case 15)."""
    run = Run(engine(**shared))
    for generate, steps in zip(order, waits, strict=True):
        run.engine.admit(generate)
        for _ in range(steps):
            run.step()
    run.to_the_end()
    assert {key: got.tokens for key, got in run.got.items()} == alone


def test_preemption_changes_nothing(alone: dict[int, list[int]]) -> None:
    """Requests that take turns in fewer slots get the same tokens: none is lost or repeated on resuming (case 22)."""
    run = Run(engine(max_running=2, slice_steps=3, prefill_chunk=64))
    for generate in MIXED:
        run.engine.admit(generate)
    run.to_the_end()
    assert {key: got.tokens for key, got in run.got.items()} == alone
    preempted = [row for got in run.got.values() for row in got.rows if row.status is RowStatus.PREEMPTED]
    assert len(preempted) > 4
    assert not any(row.token_ids.size for row in preempted)
    for batch in run.batches:
        assert batch.row_count <= 4  # two that run, and two that just made way


def test_prompts_in_chunks_change_nothing(alone: dict[int, list[int]]) -> None:
    """A prompt that takes several steps has rows without tokens until its first, and no drafts before (case 9)."""
    run = Run(engine(prefill_chunk=50))
    run.engine.admit(MIXED[2])
    run.to_the_end()
    got = run.got[3]
    assert got.tokens == alone[3]
    assert got.statuses[:4] == [RowStatus.PREFILLING] * 3 + [RowStatus.ACTIVE]
    assert not any(row.token_ids.size or row.proposal_token_ids.size for row in got.rows[:3])
    phases = [batch.header.phase for batch in run.batches]
    assert phases[:4] == [StepPhase.PREFILL] * 4
    assert set(phases[4:]) == {StepPhase.DECODE}


def test_steps_give_what_was_accepted_and_one_more() -> None:
    """A row has at most as many tokens as were verified and one more, and its first token comes with proposals."""
    run = Run(engine())
    run.engine.admit(MIXED[0])
    run.to_the_end()
    first, *others = run.got[1].rows
    assert (first.token_ids.size, first.draft_token_count, first.proposal_token_ids.size) == (1, 0, 3)
    for row in others:
        assert 1 <= row.token_ids.size <= row.draft_token_count + 1
        assert row.proposal_token_ids.size == 0
    assert {row.draft_token_count for row in others[:-1]} == {3}
    assert {batch.header.method for batch in run.batches} == {SpeculativeMethod.MTP}
    assert len(run.got[1].rows) < 25


def test_engine_without_proposer_works() -> None:
    """Without speculation every step gives one token, and the greedy ones are the same as with it (case 31)."""
    run = Run(engine(speculate=0))
    run.engine.admit(MIXED[0])
    run.to_the_end()
    assert [row.token_ids.size for row in run.got[1].rows] == [1] * 40
    assert {batch.header.method for batch in run.batches} == {SpeculativeMethod.NONE}
    assert run.got[1].tokens == tokens_alone(engine(), MIXED[0])


def test_stop_tokens_and_the_end_token_end_requests() -> None:
    """A stop token ends a request with itself; so does the end of a story, unless the request ignores it."""
    run = Run(engine())
    run.engine.admit(text_request(1, STORY, 400, temperature=0.0, stop_token_ids=[ord(".")]))
    ending = STORY + "And that was the end"
    run.engine.admit(text_request(2, ending, 60, temperature=0.0))
    run.engine.admit(text_request(3, ending, 60, temperature=0.0, ignore_end_token=True))
    run.to_the_end()
    assert run.got[1].tokens[-1] == ord(".")
    assert run.got[1].text.count(".") == 1
    assert (run.got[2].text, run.got[2].tokens[-1]) == (" of it.", 257)
    assert [run.got[key].statuses[-1] for key in (1, 2, 3)] == [
        RowStatus.FINISHED_STOP,
        RowStatus.FINISHED_STOP,
        RowStatus.FINISHED_LENGTH,
    ]
    assert run.got[3].tokens[:8] == run.got[2].tokens


def test_slot_is_filled_to_its_last_token() -> None:
    """A request that would go on for ever ends where its slot is full: prompt and output are the context."""
    run = Run(engine(context=40))
    generate = token_request(1, list(b"One day "), seed=1, ignore_end_token=True)
    generate.sampling.ClearField("max_tokens")
    run.engine.admit(generate)
    run.to_the_end()
    assert len(run.got[1].tokens) == 32
    assert run.got[1].statuses[-1] is RowStatus.FINISHED_LENGTH


def spoil(engine: PaddleEngine, key: int) -> None:
    """Write what is no number where a request's keys and values are."""
    decoder, slot = cast("PaddleDecoder", engine._decoder), engine._requests.slot(key)
    cache = decoder._runner.cache
    place = int(decoder.requests.places[slot])
    cache.write(place, *(np.full_like(each, np.nan) for each in cache.read(place, 5)))


def test_what_is_no_number_ends_its_own_request(alone: dict[int, list[int]]) -> None:
    """A request whose numbers went wrong ends alone, and the next request in its slot is not affected (case 24)."""
    run = Run(engine(max_running=2))
    run.engine.admit(MIXED[0])
    run.engine.admit(MIXED[1])
    run.step()
    spoil(run.engine, 2)
    run.step()
    assert run.got[2].statuses == [RowStatus.ACTIVE, RowStatus.UNRECOVERABLE]
    run.engine.admit(MIXED[3])
    run.to_the_end()
    assert run.got[1].tokens == alone[1]
    assert run.got[4].tokens == alone[4]


def test_closed_engine_lets_go() -> None:
    """An engine that is closed holds neither network nor cache."""
    closed: Engine = engine()
    closed.close()
    assert not hasattr(closed, "_decoder")
