"""Processes are replaced one by one under load: no request fails."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAIError

from tests.support.waiting import soon, until
from tests.system.deployment import COMMAND, Deployment
from tests.system.programs import Program
from tests.system.serving import asking, is_true, plainly

NAMES = ("worker-0", "worker-1")
TOKENS = 60


class Load:
    """Requests that follow each other at the gateways in turn, as a load balancer sends them."""

    def __init__(self, cleanup: AsyncExitStack) -> None:
        self._cleanup = cleanup
        self._gateways: dict[str, AsyncOpenAI] = {}
        self._sent: Counter[str] = Counter()
        """How many requests are at each gateway, or on their way there."""
        self._turn = count()
        self._is_over = False
        self.answers = 0
        self.failures: list[str] = []

    async def add(self, url: str) -> None:
        """Send requests to a gateway from now on, too."""
        self._gateways[url] = await self._cleanup.enter_async_context(asking(url))

    async def remove(self, url: str) -> None:
        """Send no new request to a gateway, and return when it has those that were sent."""
        del self._gateways[url]
        async with plainly(url) as client:

            async def has_all() -> bool:
                has: int = (await client.get("/healthz")).json()["open_requests"]
                return has >= self._sent[url]

            await until(has_all)

    async def goes_on(self, more: int = 3) -> None:
        """Wait for some more answers, and fail if any request so far has failed."""
        least = self.answers + more
        await until(lambda: self.answers >= least or self.failures, every=0.05)
        assert not self.failures, self.failures[:3]

    @asynccontextmanager
    async def running(self, askers: int = 3) -> AsyncIterator[None]:
        """Ask for as long as this lasts; fail at the end unless every request got exactly its tokens."""
        asked = [asyncio.create_task(self._ask_on()) for _ in range(askers)]
        try:
            yield
        finally:
            self._is_over = True
            await soon(asyncio.gather(*asked))
        assert not self.failures, self.failures[:3]

    async def _ask_on(self) -> None:
        while not self._is_over:
            gateways = list(self._gateways.items())
            url, client = gateways[next(self._turn) % len(gateways)]
            self._sent[url] += 1
            try:
                answer = await client.completions.create(model="tokenbus", prompt="1 2", max_tokens=TOKENS, logprobs=2)
            except OpenAIError as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                continue
            finally:
                self._sent[url] -= 1
            logprobs = answer.choices[0].logprobs
            if not is_true(answer) or logprobs is None or len(logprobs.tokens or ()) != TOKENS:
                self.failures.append(f"not its tokens: {answer}")
            self.answers += 1


class Fleet:
    """A processor or two, two workers and two gateways."""

    def __init__(self, deployment: Deployment, load: Load) -> None:
        # Requests are looked for that a processor takes with it, for twice the timeout: less than a client waits.
        deployment.overrides |= {"bus.heartbeat_ms": 500, "bus.heartbeat_timeout_ms": 2500}
        self._deployment = deployment
        self._load = load
        self.gateways: list[tuple[Program, str]] = []
        self.workers: dict[str, Program] = {}

    async def processor(self, **overrides: Any) -> Program:  # noqa: ANN401 - any setting's value
        return await asyncio.to_thread(self._deployment.start_processor, **overrides)

    async def worker(self, name: str, **overrides: Any) -> None:  # noqa: ANN401 - any setting's value
        """Let the worker of a name end its requests and leave, if there is one; then start another life of it."""
        if name in self.workers:
            assert await asyncio.to_thread(self.workers[name].terminate) == 0
        self.workers[name] = await asyncio.to_thread(
            self._deployment.start_worker,
            name,
            worker__drain_timeout_ms=30_000,
            **overrides,
        )

    async def gateway(self, *, replaces: bool = True, **overrides: Any) -> None:  # noqa: ANN401 - any setting's value
        """Start a gateway; the oldest gets no more requests, ends those it has, and leaves."""
        command = [COMMAND, "gateway"]
        own = {"gateway__address": "127.0.0.1:0", "gateway__tokenizer": "numbers", "gateway__drain_timeout_ms": 30_000}
        program = self._deployment.start("gateway", command, **own, **overrides)
        line = await asyncio.to_thread(program.wait_for, '"listening"')
        (url,) = re.findall(r'"address":"(http://[^"]+)"', line)
        await asyncio.to_thread(program.wait_for, '"connected"')
        await self._load.add(url)
        self.gateways.append((program, url))
        if replaces:
            oldest, at = self.gateways.pop(0)
            await self._load.remove(at)
            assert await asyncio.to_thread(oldest.terminate) == 0

    async def start(self, **overrides: Any) -> None:  # noqa: ANN401 - any setting's value
        for name in NAMES:
            await self.worker(name, **overrides)
            await self.gateway(replaces=False, **overrides)


@pytest.fixture
async def load() -> AsyncIterator[Load]:
    """Return a load whose connections end with the test."""
    async with AsyncExitStack() as cleanup:
        yield Load(cleanup)


async def test_second_processor_comes_and_the_first_is_replaced(deployment: Deployment, load: Load) -> None:
    """Gateways, then workers, learn of a second processor; then each processor is asked to end, and is replaced."""
    fleet = Fleet(deployment, load)
    first = await fleet.processor()
    await fleet.start()
    addresses: dict[str, Any] = {
        f"bus__{kind}_address": f"ipc://{deployment.folder}/{kind[0]}" for kind in ("workers", "clients")
    }
    other: dict[str, Any] = {key: f"{address}2" for key, address in addresses.items()}
    both: dict[str, Any] = {key: f"{address},{other[key]}" for key, address in addresses.items()}
    async with load.running():
        await load.goes_on()
        second = await fleet.processor(**other)
        for _ in NAMES:
            await fleet.gateway(**both)
            await load.goes_on()
        for name in NAMES:
            await fleet.worker(name, **both)
            await load.goes_on()
        for program, own in ((first, {}), (second, other)):
            assert await asyncio.to_thread(program.terminate) == 0
            await load.goes_on()
            await fleet.processor(**own)
            await load.goes_on()
