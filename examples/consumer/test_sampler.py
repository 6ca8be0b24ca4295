"""Tests of the sampler's results, with and without failures of the bus."""

import asyncio

import pytest
from sampler import Sampler

import tokenbus
from tokenbus import testing


@pytest.mark.asyncio
async def test_samples_are_in_the_order_of_the_prompts() -> None:
    def answer(generate: tokenbus.Generate) -> testing.Answer:
        return testing.Answer(tokens=[2 * each for each in generate.tokens.token_ids], logprobs=-0.5)

    async with testing.bus(testing.ScriptedEngine(answer=answer)) as bus:
        samples = await Sampler(bus.client).sample([[number] * 3 for number in range(1, 20)])
    assert [sample.tokens for sample in samples] == [[2 * number] * 3 for number in range(1, 20)]
    assert {sample.logprob for sample in samples} == {-1.5}


@pytest.mark.asyncio
async def test_lost_worker_costs_nothing_but_time() -> None:
    async with testing.bus(testing.SyntheticEngine, workers=2, step_seconds=0.2) as bus:
        sampling = asyncio.ensure_future(Sampler(bus.client).sample([[number] for number in range(8)]))
        await bus.advance(1)
        await bus.worker.lose()
        samples = await bus.until(sampling)
    assert {len(sample.tokens) for sample in samples} == {64}
    assert {sample.workers for sample in samples} == {1, 2}


@pytest.mark.asyncio
async def test_restarted_processor_is_not_noticed() -> None:
    async with testing.bus(step_seconds=0.2) as bus:
        sampling = asyncio.ensure_future(Sampler(bus.client).sample([[1], [2]]))
        await bus.advance(1)
        await bus.restart_processor()
        samples = await bus.until(sampling)
    assert [(len(sample.tokens), sample.workers) for sample in samples] == [(64, 1), (64, 1)]


@pytest.mark.asyncio
async def test_request_that_is_refused_raises() -> None:
    async with testing.bus(testing.ScriptedEngine()) as bus:
        with pytest.raises(ExceptionGroup) as failed:
            await Sampler(bus.client).sample([[1]])
    (error,) = failed.value.exceptions
    assert isinstance(error, tokenbus.RequestFailedError)
    assert error.code_name == "invalid_request"
