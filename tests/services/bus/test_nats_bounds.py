"""What a NATS server delivers of a flood: no more than it was asked for; a listener's process never sees the rest."""

import asyncio
import socket
from types import SimpleNamespace

import pytest

from tests.services.bus.nats_ends import QUICK, Ends, Start, ends, start
from tests.support.nats import NatsServer
from tests.support.waiting import soon, until
from tokenbus_services.bus.addresses import parse_nats
from tokenbus_services.bus.nats_conversation import most_frames
from tokenbus_services.bus.nats_lanes import HelloInlet
from tokenbus_services.bus.nats_peers import Peer
from tokenbus_services.bus.nats_server import Inlet, Receive, ServerConnection, Servers

__all__ = ["ends", "start"]
PAYLOAD = 65_536
FLOOD = 3000


async def connected(ends: Ends, server: NatsServer) -> ServerConnection:
    connection = await soon(Servers(parse_nats(server.address("x")), QUICK).connect())
    ends.cleanup.push_async_callback(connection.close, 0)
    return connection


class Heard:
    """Counts what a connection's subscriptions receive, up to a last message that comes behind all others."""

    def __init__(self, connection: ServerConnection) -> None:
        self.count = 0
        self.is_over = False
        connection.subscribe("over", self.end)
        self._stats = connection.client.stats

    def take(self, subject: str, payload: bytes, nobody: bool) -> None:  # noqa: FBT001 - as a Receive
        del subject, payload
        self.count += not nobody

    def end(self, subject: str, payload: bytes, nobody: bool) -> None:  # noqa: FBT001
        del subject, payload, nobody
        self.is_over = True

    @property
    def dropped(self) -> int:
        return self._stats["in_msgs"]


async def flood(server: NatsServer, heard: Heard, connection: ServerConnection, subject: str) -> None:
    await connection.client.flush()
    with socket.create_connection(("127.0.0.1", server.port)) as attacker:
        attacker.sendall(b'CONNECT {"verbose":false}\r\n' + f"PUB {subject} 1\r\nx\r\n".encode() * FLOOD)
        attacker.sendall(b"PUB over 0\r\n\r\nPING\r\n")
        read = b""
        while b"PONG" not in read:  # this blocks the event loop: the server has taken all before it runs again
            read += attacker.recv(4096)
    await until(lambda: heard.is_over)


@pytest.mark.process
async def test_server_drops_hellos_beyond_a_number(start: Start, ends: Ends) -> None:
    server = start(f"max_payload: {PAYLOAD}\n")
    connection = await connected(ends, server)
    heard = Heard(connection)
    inlet = HelloInlet(connection, "hellos", heard.take, per_second=1)  # so the next 64 come after a minute
    await flood(server, heard, connection, "hellos")
    assert (heard.count, heard.dropped) == (64, 0)
    inlet.close()


@pytest.mark.process
async def test_server_delivers_no_more_than_a_window_of_a_peer(start: Start, ends: Ends) -> None:
    """Of a welcomed peer's frames so many come that none of an honest peer's is ever missing, and no more."""
    server = start(f"max_payload: {PAYLOAD}\n")
    connection = await connected(ends, server)
    heard = Heard(connection)
    peer = Peer(b"all.flooder.1", {}, connection, lambda *_: None, QUICK)
    peer.begin("up", "down", heard.take)
    await flood(server, heard, connection, "up")
    assert (heard.count, heard.dropped) == (most_frames(PAYLOAD, QUICK), 0)
    assert 512 <= heard.count < FLOOD


class FakeLoop:
    """An event loop's clock that the test sets, and what it is to call later."""

    def __init__(self) -> None:
        self.now = 0.0
        self.later: list[tuple[float, object]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: object) -> None:
        self.later.append((seconds, call))


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> FakeLoop:
    made = FakeLoop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: made)
    return made


def test_pause_for_one_name_grows_while_it_floods(loop: FakeLoop) -> None:
    inlets: list[Inlet] = []

    def subscribe(_subject: str, receive: Receive, most: int = 0) -> Inlet:
        inlets.append(Inlet(len(inlets), receive, most))
        return inlets[-1]

    server = SimpleNamespace(max_payload=PAYLOAD, subscribe=subscribe, unsubscribe=lambda _: None)
    HelloInlet(server, "hellos", lambda *_: None, per_second=640, is_one_name=True)  # type: ignore[arg-type]

    def pause(lasts: float) -> float:
        loop.now += lasts
        for _ in range(inlets[-1].most):
            inlets[-1].received += 1
            inlets[-1].receive("hellos", b"", False)  # noqa: FBT003 - a Receive's
        seconds, again = loop.later.pop()
        loop.now += seconds
        again()  # type: ignore[operator]
        return seconds

    assert [pause(0.0) for _ in range(5)] == pytest.approx([0.2, 0.4, 0.8, 1.0, 1.0])
    assert pause(9.0) == 0.0
    assert pause(0.0) == pytest.approx(0.2)
