"""Connections: those that fail, and how they end."""

import asyncio

import pytest

from tests.in_process.builders import generate_of, settings
from tests.support.waiting import soon, turns
from tokenbus.bus import AddressError
from tokenbus.bus.memory import MemoryTransport
from tokenbus.client import Client
from tokenbus.client.session import ClientSession
from tokenbus.testing import ManualClock
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.client_pb2 import ClientFrame, ClientWelcome, ServerFrame

HERE, THERE = "memory://here", "memory://there"


class Line:
    """A client of processors of which none answers."""

    def __init__(self, *addresses: str) -> None:
        self.addresses, self.clock = addresses, ManualClock()
        self.transport = MemoryTransport(settings().bus)
        overrides = {"bus.clients_address": ",".join(addresses), "client.drain_timeout_ms": 60_000}
        self.client = Client(settings(overrides), transport=self.transport, clock=self.clock)
        self.requests = self.client.requests

    async def open(self) -> "Line":
        self.listeners = [await self.transport.listen(address) for address in self.addresses]
        await self.client.__aenter__()
        return self

    async def close(self, error: BaseException | None = None) -> None:
        await self.client.__aexit__(None, error, None)

    def fail(self, session: ClientSession) -> None:
        def fail(now: float) -> None:
            raise RuntimeError(f"nothing to say at {now}")

        session.next_message = fail  # type: ignore[method-assign]
        session.on_news()


async def test_drain_that_is_cancelled_leaves_nothing() -> None:
    before = asyncio.all_tasks()
    line = await Line(HERE, THERE).open()
    tokens = line.requests.open(generate_of(7))
    closing = asyncio.create_task(line.close())
    await turns()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(closing)
    assert tokens.error is not None
    assert asyncio.all_tasks() == before


async def test_requests_of_a_connection_that_fails_go_to_another_one(caplog: pytest.LogCaptureFixture) -> None:
    line = await Line(HERE, THERE).open()
    welcome = ClientWelcome(processor_id="p", heartbeat_interval_ms=1000, heartbeat_timeout_ms=3000)
    for listener in line.listeners:
        peer, _ = await soon(listener.receive())
        listener.send(peer, [write_frame(ServerFrame(welcome=welcome))])
    await turns()
    line.requests.open(generate_of(7))
    home = line.requests.requests[7].home
    assert home is not None
    other = line.listeners[1 - line.requests.sessions.index(home)]
    line.fail(home)
    frame = ClientFrame()
    while not frame.HasField("generate"):
        frame = read_frame(ClientFrame, (await soon(other.receive()))[1][0])
    assert frame.generate.first_request_id == 7
    assert "connection failed" in caplog.text
    with pytest.raises(ExceptionGroup):
        await soon(line.close(KeyError()))


async def test_client_with_a_wrong_address_leaves_nothing() -> None:
    before = asyncio.all_tasks()
    addresses = "tcp://127.0.0.1:5571,tcp://192.0.2.1:5571"
    client = Client(settings({"bus.clients_address": addresses, "bus.linger_ms": 0}))  # nobody takes what it says
    with pytest.raises(AddressError, match=r"192\.0\.2\.1"):
        await soon(client.__aenter__())
    assert asyncio.all_tasks() == before
