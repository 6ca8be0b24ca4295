"""A processor, a worker and a client in the test's own process, over real sockets."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.support.waiting import until
from tests.system.deployment import Deployment, Overrides
from tokenbus.client import Client
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.processor import Processor
from tokenbus.worker import Engine, Publisher
from tokenbus.worker.engine_loop import EngineLoop
from tokenbus.worker.engine_publisher import EnginePublisher

_STEP_SECONDS = 0.003
TCP: Overrides = {"bus__workers_address": "tcp://127.0.0.1:0", "bus__clients_address": "tcp://127.0.0.1:0"}


@asynccontextmanager
async def working(deployment: Deployment, engine: Engine, **overrides: object) -> AsyncIterator[Publisher]:
    stop = threading.Event()
    publisher = Publisher(deployment.settings(**overrides), vocabulary_size=engine.vocabulary_size)
    await asyncio.to_thread(publisher.__enter__)

    def paced() -> None:
        stop.wait(_STEP_SECONDS)

    engine_loop = EngineLoop(engine, EnginePublisher(publisher, engine.vocabulary_size))
    loop = asyncio.create_task(asyncio.to_thread(engine_loop.serve, stop, paced))
    try:
        yield publisher
    finally:
        stop.set()
        await loop
        # Items that are not acknowledged any more are not waited for: the test has what it needs.
        await asyncio.to_thread(publisher.__exit__, TimeoutError, TimeoutError(), None)


@dataclass(slots=True)
class Trio:
    """Three that work together, and where they met."""

    processor: Processor
    publisher: Publisher
    client: Client
    addresses: dict[str, object]


@asynccontextmanager
async def processing(deployment: Deployment, **overrides: object) -> AsyncIterator[tuple[Processor, dict[str, object]]]:
    """Run a processor over TCP, at ports of its own, and yield it with the settings by which others find it."""
    settings = deployment.settings(**TCP, processor__drain_timeout_ms=0, **overrides)
    async with Processor(settings) as processor:
        yield (
            processor,
            {"bus__workers_address": processor.workers_address, "bus__clients_address": processor.clients_address},
        )


async def met(processor: Processor) -> None:
    await until(lambda: "worker-0" in processor.workers.by_id and processor.clients.sessions)


@asynccontextmanager
async def trio(deployment: Deployment, **overrides: object) -> AsyncIterator[Trio]:
    async with (
        processing(deployment, **overrides) as (processor, addresses),
        working(deployment, SyntheticEngine(), **addresses, **overrides) as publisher,
        Client(deployment.settings(**addresses, client__drain_timeout_ms=0, **overrides)) as client,
    ):
        await met(processor)
        yield Trio(processor, publisher, client, addresses)
