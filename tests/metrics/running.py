"""A processor and a worker in one event loop, and what a scrape of them says."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from tests.support.settings import settings_of
from tests.support.waiting import MOST
from tokenbus.bus.memory import MemoryTransport
from tokenbus.client import Client
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.processor import Processor
from tokenbus.settings import Settings
from tokenbus.worker import Publisher
from tokenbus.worker.engine_loop import EngineLoop
from tokenbus.worker.engine_publisher import EnginePublisher
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TokenPrompt

_USUAL = {
    "bus.workers_address": "memory://workers",
    "bus.clients_address": "memory://clients",
    "processor.metrics_address": "127.0.0.1:0",
    "worker.metrics_address": "127.0.0.1:0",
    "processor.drain_timeout_ms": 0,
    "worker.drain_timeout_ms": 0,
}


def settings(**changed: object) -> Settings:
    overrides = {key.replace("__", "."): value for key, value in changed.items()}
    return settings_of(_USUAL | overrides)


class Bus:
    def __init__(self, chosen: Settings | None = None, *, drafts: bool = False) -> None:
        self.engine = SyntheticEngine(tokens_per_step=3, drafts=drafts)
        self._keys = count(1)
        self.settings = chosen or settings()
        transport = MemoryTransport(self.settings.bus)
        self.processor = Processor(self.settings, transport=transport)
        self.client = Client(self.settings, transport=transport)
        self.publisher = Publisher(self.settings, transport=transport, vocabulary_size=1000, epoch=1)
        self._loop = EngineLoop(self.engine, EnginePublisher(self.publisher, self.engine.vocabulary_size))

    @asynccontextmanager
    async def running(self, seconds: float = MOST) -> AsyncIterator[None]:
        connected = asyncio.Event()
        self.processor.intake.stream_observers.append(lambda _worker: connected.set())
        async with asyncio.timeout(seconds), self.processor, self.client, self.publisher:
            await connected.wait()
            yield

    async def serve(self, requests: int, tokens: int) -> None:
        stop = threading.Event()
        serving = asyncio.create_task(asyncio.to_thread(self._loop.serve, stop))
        try:
            for _ in range(requests):
                asked = Generate(
                    request_id=next(self._keys),
                    tokens=TokenPrompt(token_ids=[1]),
                    sampling=SamplingParameters(max_tokens=tokens),
                    top_logprobs=2,
                )
                assert len([token async for token in self.client.generate(asked)]) == tokens
        finally:
            stop.set()
            await serving


class Scrape:
    """What a scrape says, as Prometheus' own parser reads it."""

    def __init__(self, text: str) -> None:
        self.families: dict[str, Metric] = {}
        for family in text_string_to_metric_families(text):
            assert family.name not in self.families
            self.families[family.name] = family
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float | None:
        return self._values.get((f"tokenbus_{name}", frozenset(labels.items())))


def scrape(collector: Collector) -> Scrape:
    return Scrape(generate_latest(collector).decode())
