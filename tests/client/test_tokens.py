"""RequestTokens: one request's tokens, each once and in order, and then its end."""

import asyncio

import pytest

from tests.in_process.builders import ids, step_of
from tests.support.waiting import soon, turns
from tokenbus.client.tokens import RequestTokens
from tokenbus.delivery import RequestFailedError, Step, Token
from tokenbus.delivery.errors import brief
from tokenbus.engines import synthetic
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import RowStatus, Scoring
from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestError

KEY = 5
BROKEN = RequestError(request_id=KEY, code=ErrorCode.ERROR_CODE_GAP, message="lost", emitted_tokens=3)


def put(tokens: RequestTokens, position: int, count: int, **more: object) -> Step:
    status = RowStatus.ACTIVE if count else RowStatus.IDLE
    row = RowShape(KEY, position, count, status)._replace(**more)  # type: ignore[arg-type]
    step = step_of(batch([RowShape(9, 77), row]))
    step.pending_ack.keep()
    tokens.put(step, 1)
    return step


async def taken(tokens: RequestTokens) -> list[Token]:
    return [token async for token in tokens]


async def test_tokens_come_one_by_one_with_all_that_belongs_to_them() -> None:
    """Each token has its id, position, logprob, rank and alternatives, whatever its neighbour has (case 11, 23)."""
    tokens = RequestTokens(KEY)
    put(tokens, 0, 2, top_k=3)
    put(tokens, 2, 1)
    tokens.finish(RowStatus.FINISHED_LENGTH)
    found = await taken(tokens)
    true = synthetic.true_tokens(KEY, 0, 3)
    assert [token.id for token in found] == true.ids.tolist()
    assert [token.position for token in found] == [0, 1, 2]
    assert [token.logprob for token in found] == true.logprobs.tolist()
    assert [token.rank for token in found] == true.ranks.tolist()
    assert [len(token.alternatives) for token in found] == [3, 3, 0]
    assert all(token.alternatives == tuple(sorted(token.alternatives, key=lambda pair: -pair[1])) for token in found)
    assert tokens.status is RowStatus.FINISHED_LENGTH


async def test_ids_alone_and_shed_alternatives_are_told_apart() -> None:
    tokens = RequestTokens(KEY)
    put(tokens, 0, 1, scoring=Scoring.NONE)
    put(tokens, 1, 1, scoring=Scoring.SHED)
    tokens.finish(RowStatus.FINISHED_STOP)
    bare, shed = await taken(tokens)
    assert (bare.logprob, bare.rank, bare.is_shed) == (None, None, False)
    assert (shed.rank is not None, shed.alternatives, shed.is_shed) == (True, (), True)


async def test_rows_come_as_arrays() -> None:
    tokens = RequestTokens(KEY)
    put(tokens, 0, 2)
    put(tokens, 2, 0)
    put(tokens, 2, 1)
    tokens.finish(RowStatus.FINISHED_LENGTH)
    found = [row async for row in tokens.rows()]
    assert [(row.position, row.token_ids.tolist()) for row in found] == [(0, ids(KEY, 0, 2)), (2, ids(KEY, 2, 3))]


@pytest.mark.parametrize("position", [0, 1, 2, 3, 4])
async def test_tokens_from_a_position_on(position: int) -> None:
    """A consumer that has some tokens already gets only those after them, also from within a row (case 14, 22)."""
    tokens = RequestTokens(KEY, position)
    put(tokens, 0, 3, top_k=2)
    put(tokens, 3, 1)
    tokens.finish(RowStatus.FINISHED_LENGTH)
    found = await taken(tokens)
    assert [token.position for token in found] == list(range(position, 4))
    assert [token.id for token in found] == ids(KEY, position, 4)
    assert [token.logprob for token in found] == synthetic.true_tokens(KEY, position, 4).logprobs.tolist()
    assert [len(token.alternatives) for token in found if token.position < 3] == [2] * max(0, 3 - position)


@pytest.mark.parametrize("scoring", [Scoring.NONE, Scoring.SHED])
async def test_rows_without_scores_or_alternatives_are_cut_too(scoring: Scoring) -> None:
    tokens = RequestTokens(KEY, 1)
    put(tokens, 0, 3, scoring=scoring)
    tokens.finish(RowStatus.FINISHED_LENGTH)
    (row,) = [row async for row in tokens.rows()]
    scored = 2 if scoring is Scoring.SHED else 0
    assert (row.position, row.token_ids.tolist()) == (1, ids(KEY, 1, 3))
    assert (row.logprobs.size, row.ranks.size, len(row.alternative_token_ids)) == (scored, scored, 2)


async def test_consumer_waits_until_something_comes() -> None:
    tokens = RequestTokens(KEY)
    waiting = asyncio.create_task(taken(tokens))
    await turns()
    assert tokens._waiter.is_waiting
    put(tokens, 0, 1)
    await turns()
    assert tokens._waiter.is_waiting
    tokens.finish(RowStatus.FINISHED_STOP)
    assert [token.id for token in await soon(waiting)] == ids(KEY, 0, 1)
    assert not tokens._waiter.is_waiting


async def test_error_comes_after_what_came_before_it() -> None:
    tokens = RequestTokens(KEY)
    put(tokens, 0, 2)
    assert not tokens.has_ended
    tokens.fail(BROKEN)
    assert tokens.has_ended
    assert [(await anext(tokens)).position for _ in range(2)] == [0, 1]
    for _ in range(2):
        with pytest.raises(RequestFailedError, match=r"0000000000000005: gap: lost \(after 3 tokens\)") as raised:
            await anext(tokens)
        assert (raised.value.request_id, raised.value.code) == (KEY, ErrorCode.ERROR_CODE_GAP)
        assert (raised.value.emitted_tokens, raised.value.reason) == (3, "lost")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("short", "short"), ("", "gap"), ("x" * 1001, "x" * 1000), ("\u6f22" * 400, "\u6f22" * 333), ("\udcff", "?")],
)
def test_text_of_an_error_fits(text: str, expected: str) -> None:
    assert brief(text, ErrorCode.ERROR_CODE_GAP) == expected
