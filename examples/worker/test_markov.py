"""Tests of the engine over a whole bus in this process."""

import math

import pytest
from markov import END, LETTERS, MarkovEngine

import tokenbus
from tokenbus import testing

TEXT = "the cat sat. the dog sat. the cat ran."


def ids(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


@pytest.mark.asyncio
@pytest.mark.tokenbus(engine=lambda: MarkovEngine(TEXT))
async def test_answer_ends_with_a_full_stop(tokenbus_bus: testing.Bus) -> None:
    generation = tokenbus_bus.client.generate(ids("th"), seed=1, top_logprobs=3)
    tokens = [token async for token in generation]
    assert tokens[-1].id == END
    assert generation.status is tokenbus.RowStatus.FINISHED_STOP
    for token in tokens:
        assert token.logprob is not None and token.logprob <= 0
        assert len(token.alternatives) == 3
        assert token.rank is not None and (token.rank > 3 or token.alternatives[token.rank - 1][1] == token.logprob)


@pytest.mark.asyncio
@pytest.mark.tokenbus(engine=lambda: MarkovEngine(TEXT))
async def test_many_requests_share_steps_and_their_seeds_decide(tokenbus_bus: testing.Bus) -> None:
    async def letters(seed: int) -> str:
        return "".join(
            [LETTERS[token.id] async for token in tokenbus_bus.client.generate(ids("t"), seed=seed, max_tokens=20)]
        )

    alone = [await letters(seed) for seed in range(8)]
    async with tokenbus_bus.client.steps() as steps:
        asked = {tokenbus_bus.client.submit(ids("t"), seed=seed, max_tokens=20): seed for seed in range(8)}
        together = dict.fromkeys(asked.values(), "")
        while asked:
            item = await anext(steps)
            if isinstance(item, tokenbus.RequestEnd):
                asked.pop(item.request_id)
            else:
                for row in item.target.rows():
                    together[asked[row.request_id]] += "".join(LETTERS[token] for token in row.token_ids)
    assert list(together.values()) == alone


@pytest.mark.asyncio
@pytest.mark.tokenbus(engine=lambda: MarkovEngine(TEXT), step_seconds=0.1)
async def test_aborted_request_ends(tokenbus_bus: testing.Bus) -> None:
    generation = tokenbus_bus.client.generate(ids("t"), seed=5, request_id=7)
    await tokenbus_bus.until(anext(generation))
    tokenbus_bus.client.abort(7)

    async def rest() -> int:
        return len([token async for token in generation])

    await tokenbus_bus.until(rest())
    assert not tokenbus_bus.worker.engine.has_work


@pytest.mark.asyncio
@pytest.mark.tokenbus(engine=lambda: MarkovEngine(TEXT))
async def test_prompt_of_other_ids_is_refused(tokenbus_bus: testing.Bus) -> None:
    with pytest.raises(tokenbus.RequestFailedError, match="tokens: ids from 0 to 27"):
        [token async for token in tokenbus_bus.client.generate([500])]


def test_chain_is_one_of_probabilities() -> None:
    chain = MarkovEngine(TEXT)
    assert all(math.isclose(sum(math.exp(each) for each in row), 1) for row in chain.logprobs)
