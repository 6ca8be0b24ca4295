"""Processors that are found over NATS: they come while all runs, get workers, and give them up again."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.integration.asking import all_exact, ask, begun
from tests.integration.deployment import Deployment
from tests.integration.inprocess import working
from tests.support.nats import NatsServer
from tests.support.waiting import MOST, soon, turns, until
from tokenbus_engines.synthetic import SyntheticEngine
from tokenbus_services.client import Client
from tokenbus_services.processor import Processor


@pytest.fixture
def server(deployment: Deployment) -> Iterator[NatsServer]:
    """Return the server at which all find each other, and soon take notice of each other."""
    made = NatsServer(deployment.folder)
    deployment.overrides |= {
        "bus.workers_address": made.address("workers.*"),
        "bus.clients_address": made.address("clients.*"),
        "bus.heartbeat_interval_ms": 50,
        "bus.heartbeat_timeout_ms": 1500,
    }
    yield made
    made.kill()


@asynccontextmanager
async def workers(deployment: Deployment, count: int) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for number in range(count):
            await stack.enter_async_context(working(deployment, SyntheticEngine(), worker__id=f"w{number}"))
        yield


def connected(processor: Processor) -> int:
    """Return how many workers a processor has now."""
    return sum(worker.peer is not None for worker in processor.workers.by_id.values())


async def test_processor_that_comes_gets_workers_and_one_that_leaves_gives_them_up(
    deployment: Deployment, server: NatsServer
) -> None:
    """Workers and a client wait for the first processor, spread to a second one, and go back: no token is lost."""
    del server
    async with AsyncExitStack() as stack, workers(deployment, 2):
        client = await stack.enter_async_context(Client(deployment.settings()))
        assert (client.is_connected, client.refusal) == (False, "")
        early = ask(client, 2, 30)
        first = await stack.enter_async_context(Processor(deployment.settings()))
        await all_exact(early, 30)
        await until(lambda: connected(first) == 2)
        asked = ask(client, 2, 1200)
        await begun(asked)
        async with Processor(deployment.settings()) as second:
            await until(lambda: connected(second) == connected(first) == 1)
        await until(lambda: connected(first) == 2)
        await all_exact(asked, 1200)
        await until(lambda: len(client.sessions) == 1)


async def test_watching_goes_on_at_a_processor_that_comes(deployment: Deployment, server: NatsServer) -> None:
    """A client that watches sees the workers of a processor that it finds later."""
    del server
    chosen = deployment.settings()
    async with Client(chosen) as client, client.watch() as watched, workers(deployment, 1), Processor(chosen):
        ask(client, 1, 4)
        assert (await anext(watched)).worker_id == "w0"


async def test_status_waits_for_a_processor_to_be_found(deployment: Deployment, server: NatsServer) -> None:
    """A client that has found no processor yet has the status of the first that it finds."""
    del server
    async with Client(deployment.settings()) as client:
        asked = asyncio.create_task(client.status(timeout_seconds=MOST))
        await turns()
        assert not asked.done()
        async with Processor(deployment.settings()):
            assert (await soon(asked)).connected_clients == 1


async def test_status_without_a_processor(deployment: Deployment, server: NatsServer) -> None:
    """A client that has found no processor yet has no status."""
    del server
    async with Client(deployment.settings()) as client:
        with pytest.raises(TimeoutError):
            await client.status(timeout_seconds=0.01)
