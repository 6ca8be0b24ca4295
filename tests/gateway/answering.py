"""A gateway's application on an in-process bus: requests reach its routes without a socket or a process."""

import asyncio
import platform
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace

import httpx
import httpx2
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.support.settings import settings_of
from tests.support.waiting import MOST
from tokenbus.gateway.encoder_pool import EncoderPool
from tokenbus.gateway.gateway import Gateway
from tokenbus.gateway.routes import Routes
from tokenbus.logs import DeduplicatedLog
from tokenbus.testing import Bus, bus
from tokenbus.worker import Engine

platform.platform()  # OpenAI's client asks for it, and the first time that starts a process


class App:
    def __init__(self, gateway: Gateway, bus: Bus) -> None:
        self.gateway = gateway
        self.bus = bus
        self.asgi = Routes(gateway).app()

    def client(self, peer: str = "127.0.0.1", base_url: str = "http://localhost") -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.asgi, client=(peer, 50_000))
        return httpx.AsyncClient(transport=transport, base_url=base_url, timeout=MOST)

    def openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=self._client2())

    def anthropic(self) -> AsyncAnthropic:
        return AsyncAnthropic(base_url="http://localhost", api_key="none", max_retries=0, http_client=self._client2())

    def _client2(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(self.asgi), timeout=MOST)


@asynccontextmanager
async def answering(engine: Engine | None = None, *, workers: int = 1, **overrides: object) -> AsyncIterator[App]:
    """Run a processor, workers and a gateway on this event loop; settings have a double underscore for the dot."""
    given = {"gateway.tokenizer": "numbers", **{name.replace("__", "."): value for name, value in overrides.items()}}
    async with bus(engine, workers=workers) as system:
        found = settings_of(given)
        settings = replace(system.settings, gateway=found.gateway, durable_log=found.durable_log)
        with closing(DeduplicatedLog()) as repeated_log:
            encoders = EncoderPool(settings, repeated_log)
            gateway = Gateway(settings, system.client, encoders, repeated_log)
            gateway.dispatching = asyncio.create_task(gateway.dispatcher.run())
            await asyncio.sleep(0)  # the dispatcher opens the client's steps before anything can be submitted
            try:
                yield App(gateway, system)
            finally:
                gateway.dispatching.cancel()
                await asyncio.gather(gateway.dispatching, return_exceptions=True)
                await encoders.close()
