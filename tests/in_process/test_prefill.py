"""A request goes from a prefill to a decode worker, and on wherever one of them dies: bit for bit as at one engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest

from tests.engines.runs import PROMPT, asked, ngram
from tokenbus import testing
from tokenbus.client.tokens import Generation
from tokenbus.engines.ngram import NgramEngine, NgramOptions

TOKENS = 30
Tokens = list[tuple[int, float | None]]


@asynccontextmanager
async def pairs() -> AsyncIterator[tuple[testing.Bus, Generation, "asyncio.Future[Tokens]"]]:
    async with testing.bus(workers=0, step_seconds=0.1) as bus:
        roles: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode", "prefill", "decode")
        for role in roles:
            await bus.add_worker(NgramEngine(NgramOptions(role=role)), role=role)
        generation = bus.client.generate(PROMPT, max_tokens=TOKENS, seed=5, top_logprobs=0)
        yield bus, generation, asyncio.ensure_future(_taken(generation))


async def _taken(generation: Generation) -> Tokens:
    return [(token.id, token.logprob) async for token in generation]


def whole() -> Tokens:
    got = ngram([asked(1, PROMPT, 0, max_tokens=TOKENS, seed=5)]).to_the_end().got[1]
    return list(zip(got.tokens, got.logprobs, strict=True))


async def having(bus: testing.Bus, role: str) -> testing.Worker:
    while True:
        for worker in bus.workers:
            if worker.publisher.settings.worker.role == role and worker.publisher.session.requests:
                return worker
        await bus.advance(0.01)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_request_outlives_either_worker(role: str) -> None:
    async with pairs() as (bus, generation, tokens):
        worker = await having(bus, role)
        if role == "decode":
            await bus.advance(0.35)  # some steps
        await worker.lose()
        assert await bus.until(tokens) == whole()
        assert [turn.reason for turn in generation.turns] == ["", "worker_lost"]


async def test_request_outlives_a_processor_that_was_to_pass_it_on() -> None:
    """The next life of the processor gets the last row of the prefill again, and does not have the request."""
    async with pairs() as (bus, generation, tokens):
        worker = await having(bus, "prefill")
        worker.line.hold()
        await bus.advance(0.3)
        await bus.lose_processor()
        worker.line.release()
        await bus.start_processor()
        assert await bus.until(tokens) == whole()
        assert len(generation.turns) == 2


async def test_decode_worker_that_goes_as_the_prefill_ends_is_no_loss() -> None:
    async with pairs() as (bus, generation, tokens):
        worker = await having(bus, "prefill")
        worker.line.hold()
        await bus.advance(0.3)
        target = bus.processor.registry.table.decoder.max()
        reserved = bus.processor.workers.by_stream[int(target)].stream.worker_id
        (leaving,) = (each for each in bus.workers if each.id == reserved)
        await leaving.stop()
        worker.line.release()
        assert await bus.until(tokens) == whole()
        assert len(generation.turns) == 1
