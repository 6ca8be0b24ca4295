"""Links that break between machines, through a proxy."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from tests.support.proxy import Proxy
from tests.support.waiting import until
from tests.system.asking import all_exact, all_failed, ask, begun
from tests.system.deployment import Deployment
from tests.system.inprocess import TCP, working
from tokenbus.bus.link import SessionState
from tokenbus.client import Client
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.processor import Processor
from tokenbus.worker import Publisher
from tokenbus_contracts.generated.request_pb2 import ErrorCode

LONG = 600_000
QUICK = {"bus__heartbeat_timeout_ms": 1500}


@dataclass(slots=True)
class Linked:
    """A processor, a worker and a client, with a proxy before each of the processor's addresses."""

    processor: Processor
    publisher: Publisher
    engine: SyntheticEngine
    client: Client
    workers: Proxy
    clients: Proxy


@asynccontextmanager
async def linked(deployment: Deployment, **overrides: object) -> AsyncIterator[Linked]:
    """Run them; a step comes in six messages, so that most breaks are in the middle of one."""
    engine = SyntheticEngine(drafts=True, parts=3)
    settings = deployment.settings(**TCP, processor__drain_timeout_ms=0, **overrides)
    async with (
        Processor(settings) as processor,
        Proxy(processor.workers_address) as workers,
        Proxy(processor.clients_address) as clients,
        working(deployment, engine, bus__workers_address=workers.address, **overrides) as publisher,
        Client(
            deployment.settings(bus__clients_address=clients.address, client__drain_timeout_ms=0, **overrides)
        ) as client,
    ):
        await until(lambda: "worker-0" in processor.workers.by_id and processor.clients.sessions)
        yield Linked(processor, publisher, engine, client, workers, clients)


async def test_connections_that_break_lose_nothing(deployment: Deployment) -> None:
    """Connections of a worker and of a client are reset again and again, and refused for a while: no token is lost."""
    async with linked(deployment) as four:
        asked = ask(four.client, 4, 1200)
        await begun(asked)
        for proxy in (four.workers, four.clients) * 2:
            proxy.cut()
            passed = proxy.passed
            proxy.restore()
            await until(lambda: proxy.passed > passed + 5000 or asked[-1].task.done())  # noqa: B023 - awaited here
        assert not asked[-1].task.done()
        await all_exact(asked, 1200)


@pytest.mark.nightly
@pytest.mark.parametrize("which", ["workers", "clients"])
async def test_link_that_stalls_for_less_than_the_timeout_loses_nothing(deployment: Deployment, which: str) -> None:
    """What a stalled link holds back arrives when it flows again, however long a step may wait for its parts."""
    async with linked(deployment, processor__step_timeout_ms=1000) as four:
        proxy: Proxy = getattr(four, which)
        asked = ask(four.client, 8, 1800)
        await begun(asked)
        proxy.stall()
        enough = four.processor.clock.now() + 1.3
        await until(lambda: four.processor.clock.now() > enough)
        assert not any(each.task.done() for each in asked)
        proxy.restore()
        await all_exact(asked, 1800)


@pytest.mark.nightly
async def test_worker_behind_a_stalled_link_is_lost_and_ends_what_nobody_wants(deployment: Deployment) -> None:
    """A worker cut off for too long is given up; back again, it ends the old requests and serves new ones."""
    async with linked(deployment, **QUICK) as four:
        asked = ask(four.client, 8, LONG)
        await begun(asked)
        four.workers.stall()
        await all_failed(asked, ErrorCode.ERROR_CODE_WORKER_LOST)
        four.workers.restore()
        await until(lambda: "worker-0" in four.processor.workers.by_id)
        await until(lambda: not four.engine.has_work)
        await all_exact(ask(four.client, 8, 300), 300)


@pytest.mark.nightly
async def test_client_behind_a_stalled_link_gets_everything(deployment: Deployment) -> None:
    """A client cut off for longer than the timeout, but not longer than it may be away, gets every token."""
    async with linked(deployment, **QUICK) as four:
        asked = ask(four.client, 8, 1800)
        await begun(asked)
        four.clients.stall()
        await until(lambda: four.client.sessions[0].state is SessionState.GREETING)
        await until(lambda: not any(session.peer for session in four.processor.clients.sessions.values()))
        four.clients.restore()
        await all_exact(asked, 1800)
