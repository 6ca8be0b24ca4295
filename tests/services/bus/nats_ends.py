"""What the tests of NATS share: servers, and ends of the transport that are closed after the test."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.services.bus.harness import SETTINGS
from tests.support.nats import NatsServer
from tests.support.proxy import Proxy
from tests.support.waiting import soon
from tokenbus_services.bus import Connection, Listener
from tokenbus_services.bus.nats import NatsTransport
from tokenbus_services.settings import BusSettings

QUICK = replace(SETTINGS, heartbeat_interval_ms=50, heartbeat_timeout_ms=1000, linger_ms=200)
Start = Callable[..., NatsServer]


class Ends:
    """Makes listeners and connections, and closes them after the test."""

    def __init__(self) -> None:
        self.cleanup = AsyncExitStack()
        self.reasons: list[str] = []

    async def listen(self, address: str, settings: BusSettings = QUICK) -> Listener:
        """Listen; what is refused is kept."""
        listener = await soon(NatsTransport(settings).listen(address, self.reasons.append))
        self.cleanup.push_async_callback(listener.close)
        return listener

    async def connect(self, address: str, settings: BusSettings = QUICK) -> Connection:
        connection = await soon(NatsTransport(settings).connect(address))
        self.cleanup.push_async_callback(connection.close)
        return connection


@asynccontextmanager
async def line_to(server: NatsServer) -> AsyncIterator[tuple[Proxy, str]]:
    """Yield a proxy, and the address of `workers` through it: who is cut off there is gone without a word.

    Close that end before leaving: it connects again and again, and the proxy would go while it takes a connection.
    """
    async with Proxy(f"tcp://{server.server}") as proxy:
        yield proxy, f"{proxy.address.replace('tcp:', 'nats:')}/workers"


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    """Return what makes ends; no task of theirs fails."""
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    made = Ends()
    yield made
    await soon(made.cleanup.aclose())
    assert not errors, errors


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[NatsServer] = []

    def server(config: str = "") -> NatsServer:
        folder = tmp_path / f"server-{len(made)}"
        folder.mkdir()
        made.append(NatsServer(folder, config))
        return made[-1]

    yield server
    for each in made:
        each.resume()
        each.kill()
