"""Links that break between machines, through a proxy."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from tests.support.proxy import Proxy
from tests.support.waiting import until
from tests.system.asking import all_exact, ask, begun
from tests.system.deployment import Deployment
from tests.system.inprocess import TCP, working
from tokenbus.client import Client
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.processor import Processor


@dataclass(slots=True)
class Linked:
    """A processor, a worker and a client, with a proxy before each of the processor's addresses."""

    processor: Processor
    client: Client
    proxies: tuple[Proxy, Proxy]


@asynccontextmanager
async def linked(deployment: Deployment, **overrides: object) -> AsyncIterator[Linked]:
    """Run them; a step comes in six messages, so that most breaks are in the middle of one."""
    settings = deployment.settings(**TCP, processor__drain_timeout_ms=0, **overrides)
    async with (
        Processor(settings) as processor,
        Proxy(processor.workers_address) as workers,
        Proxy(processor.clients_address) as clients,
        working(deployment, SyntheticEngine(drafts=True, parts=3), bus__workers_address=workers.address),
        Client(deployment.settings(bus__clients_address=clients.address, client__drain_timeout_ms=0)) as client,
    ):
        yield Linked(processor, client, (workers, clients))


async def test_connections_that_break_lose_nothing(deployment: Deployment) -> None:
    """Connections of a worker and of a client are reset again and again, and refused for a while: no token is lost."""
    async with linked(deployment) as three:
        asked = ask(three.client, 4, 1200)
        await begun(asked)
        for proxy in three.proxies * 2:
            proxy.cut()
            passed = proxy.passed
            proxy.restore()
            await until(lambda: proxy.passed > passed + 5000 or asked[-1].task.done())  # noqa: B023 - awaited here
        await all_exact(asked, 1200)


@pytest.mark.nightly
@pytest.mark.parametrize("which", [0, 1], ids=["workers", "clients"])
async def test_link_that_stalls_for_less_than_the_timeout_loses_nothing(deployment: Deployment, which: int) -> None:
    """What a stalled link holds back arrives when it flows again, however long a step may wait for its parts."""
    async with linked(deployment, processor__step_timeout_ms=1000) as three:
        asked = ask(three.client, 4, 1200)
        await begun(asked)
        three.proxies[which].stall()
        enough = three.processor.clock.now() + 1.3
        await until(lambda: three.processor.clock.now() > enough)
        three.proxies[which].restore()
        await all_exact(asked, 1200)
