"""Prefill and decode workers as processes: a request begins at one and goes on at another."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.waiting import until
from tests.system.asking import all_exact, all_failed, ask, begun
from tests.system.deployment import Deployment
from tests.system.programs import Program
from tokenbus.client import Client
from tokenbus.processor import Processor
from tokenbus_contracts.generated.request_pb2 import ErrorCode

DECODERS = ("decode-0", "decode-1")


def start(deployment: Deployment, name: str, **overrides: object) -> Program:
    """Start a worker whose role is the beginning of its name."""
    return deployment.start_worker(name, worker__role=name.partition("-")[0], **overrides)


@asynccontextmanager
async def client_of(deployment: Deployment) -> AsyncIterator[Client]:
    """Run a client that leaves at once when the test is over."""
    async with Client(deployment.settings(client__drain_timeout_ms=0)) as client:
        yield client


async def test_requests_go_on_at_decode_workers(deployment: Deployment) -> None:
    """Each request begins at the prefill worker and goes on at a decode worker; all of those take part (case 27)."""
    async with Processor(deployment.settings(processor__drain_timeout_ms=0)) as processor:
        for name in ("prefill-0", *DECODERS):
            await asyncio.to_thread(start, deployment, name)
        async with client_of(deployment) as client:
            asked = ask(client, 32, 61)
            await all_exact(asked, 61)
        tokens = {name: worker.stream.counts.tokens for name, worker in processor.workers.by_id.items()}
    assert tokens["prefill-0"] == 32
    assert all(tokens[name] for name in DECODERS)
    assert sum(tokens.values()) == 32 * 61


async def test_request_that_ends_with_its_first_token_is_not_handed_off(deployment: Deployment) -> None:
    async with Processor(deployment.settings(processor__drain_timeout_ms=0)) as processor:
        for name in ("decode-0", "prefill-0"):
            await asyncio.to_thread(start, deployment, name)
        async with client_of(deployment) as client:
            await all_exact(ask(client, 4, 1), 1)
        tokens = processor.workers.by_id["decode-0"].stream.counts.tokens
    assert tokens == 0


async def test_killed_processor_loses_no_hand_off(deployment: Deployment) -> None:
    """A processor that is killed while requests change hands loses and repeats nothing of them."""
    processor = await asyncio.to_thread(deployment.start_processor)
    for name in ("prefill-0", *DECODERS):
        await asyncio.to_thread(start, deployment, name)
    async with client_of(deployment) as client:
        for _ in range(4):
            asked = ask(client, 16, 301)
            await begun(asked[:1])
            processor.kill()
            processor = await asyncio.to_thread(deployment.start_processor)
            await all_exact(asked, 301)


async def test_dead_decode_worker_ends_its_requests_alone(deployment: Deployment) -> None:
    """A decode worker that is killed ends what it went on with, and the other one's requests notice nothing."""
    async with Processor(deployment.settings(processor__drain_timeout_ms=0)) as processor:
        await asyncio.to_thread(start, deployment, "prefill-0")
        doomed = await asyncio.to_thread(start, deployment, DECODERS[0])
        async with client_of(deployment) as client:
            first = ask(client, 8, None)
            await until(lambda: all(each.audit.position > 1 for each in first))
            await asyncio.to_thread(start, deployment, DECODERS[1])
            second = ask(client, 8, 900)  # they go to the one with fewer
            await until(lambda: all(each.audit.position > 1 for each in second))
            doomed.kill()
            await all_failed(first, ErrorCode.ERROR_CODE_WORKER_LOST)
            await all_exact(second, 900)
        assert list(processor.workers.by_id) == ["prefill-0", DECODERS[1]]
