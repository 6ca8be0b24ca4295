"""Processes are replaced one by one under load: no request fails."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count

import httpx

from tests.support.waiting import soon, until
from tests.system.deployment import Deployment
from tests.system.programs import Program
from tests.system.serving import plainly
from tests.system.several import Several
from tokenbus.engines.synthetic import true_tokens

ASKED = {"model": "tokenbus", "prompt": "1 2", "max_tokens": 60, "logprobs": 2}


class Load:
    """Requests that follow each other at the gateways in turn, as a load balancer sends them."""

    def __init__(self, cleanup: AsyncExitStack) -> None:
        self._cleanup = cleanup
        self._gateways: dict[str, httpx.AsyncClient] = {}
        self._sent: Counter[str] = Counter()
        """How many requests are at each gateway, or on their way there."""
        self._turn = count()
        self._is_over = False
        self.answers = 0
        self.failures: list[str] = []

    async def add(self, url: str) -> None:
        self._gateways[url] = await self._cleanup.enter_async_context(plainly(url))

    async def remove(self, url: str) -> None:
        """Send no new request to a gateway, and return when it has those that were sent."""
        client = self._gateways.pop(url)

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
                answer = (await client.post("/v1/completions", json=ASKED)).json()
                true = true_tokens(int(answer["id"].rpartition("-")[2], 16), 0, 60)
                if answer["choices"][0]["text"] != "".join(f" {token}" for token in true.ids.tolist()):
                    self.failures.append(f"not its tokens: {answer}")
                self.answers += 1
            except (httpx.HTTPError, LookupError, ValueError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            finally:
                self._sent[url] -= 1


async def test_everything_is_replaced_one_by_one(deployment: Deployment) -> None:
    several = Several(deployment)
    workers: dict[str, Program] = {}

    async def replaced(program: Program) -> None:
        assert await asyncio.to_thread(program.terminate) == 0
        await load.goes_on()

    async with AsyncExitStack() as cleanup:
        load = Load(cleanup)
        await asyncio.to_thread(several.start_all)
        for name in ("worker-0", "worker-1"):
            workers[name] = await asyncio.to_thread(several.worker, name)
        first, url = await asyncio.to_thread(several.gateway)
        await load.add(url)
        async with load.running():
            await load.goes_on()
            _, second = await asyncio.to_thread(several.gateway)
            await load.add(second)
            await load.remove(url)
            await replaced(first)
            for name, worker in workers.items():
                await replaced(worker)
                await asyncio.to_thread(several.worker, name)
                await load.goes_on()
            for place in (0, 1):
                await replaced(several.processors[place])
                await asyncio.to_thread(several.start, place)
                await load.goes_on()
