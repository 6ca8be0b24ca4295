"""ZeroMQ: a peer that speaks something else, sends too much, or nothing, is cut off, reported, and harms no other."""

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.bus.foreign import call, sending
from tests.bus.harness import MAX_PART_BYTES, Bus, both_ways, introduce, meet_again
from tests.support.waiting import soon, until
from tokenbus.bus import Listener, Outcome
from tokenbus.bus.accepted import AcceptedConnection, local_address_of
from tokenbus.bus.sockets import LoopSocket
from tokenbus.bus.zap import Authenticator

Make = Callable[..., Bus]


async def refusal_of(bus: Bus, foreign: Callable[[Listener], Any]) -> str:
    reasons: asyncio.Queue[str] = asyncio.Queue()
    listener = await bus.listen(refused=reasons.put_nowait)
    connection = await bus.connect(listener.address)
    peer = await introduce(connection, listener)
    stranger = foreign(listener)
    try:
        reason = await soon(reasons.get())
    finally:
        stranger.close()
    await both_ways(listener, connection, peer, [b"still here"], [b"so am I"])
    await soon(connection.close())
    await soon(listener.close())
    assert reasons.empty()
    return reason


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: tokenbus\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 4000\r\n\r\n" + b"x" * 4000,
        bytes(range(256)),
        b"\x05\x00hell\x05\x00hell",  # a message, in ZeroMQ's protocol of 2009
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + bytes(range(200)),  # a ZeroMQ greeting, then nonsense
    ],
)
async def test_peer_that_speaks_something_else(tcp: Bus, data: bytes) -> None:
    """Data that is not this protocol is refused, once, never received, and disturbs no other peer."""
    reason = await refusal_of(tcp, sending(data))
    assert re.match(r"(a peer|127\.0\.0\.1:\d+): ", reason)
    assert re.search("it did not speak this protocol|its handshake does not follow this protocol", reason)


async def test_peer_that_leaves_at_once(tcp: Bus) -> None:
    def knock(listener: Listener) -> socket.socket:
        stranger = call(listener)
        stranger.close()
        return stranger

    assert (await refusal_of(tcp, knock)).endswith("it left before the handshake was done")


class Foreign:
    """A ZeroMQ socket that is not ours, and so sends what ours would not."""

    def __init__(self, kind: int, address: str, parts: list[bytes]) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if address:
            self.socket.connect(address)
        if parts:
            self.socket.send_multipart(parts)

    def close(self) -> None:
        self.socket.close(linger=0)
        self._context.term()


@pytest.mark.parametrize("kind", ["zeromq-ipc", "zeromq-tcp"])
@pytest.mark.parametrize("surplus", [1, 5_000_000])
async def test_part_that_is_too_large(make: Make, kind: str, surplus: int) -> None:
    """A peer that sends a part above the bound is cut off, with a reason, and no other peer is."""
    bus = make(kind)
    parts = [b"small", bytes(MAX_PART_BYTES + surplus)]
    reason = await refusal_of(bus, lambda listener: Foreign(zmq.DEALER, listener.address, parts))
    assert f"a part above {MAX_PART_BYTES} bytes" in reason


async def test_listener_that_speaks_something_else(tcp: Bus) -> None:
    address = tcp.address()
    host, port = address.removeprefix("tcp://").split(":")
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x01\x00\x05\x00hell\x05\x00hell")  # messages, in ZeroMQ's protocol of 2009
        with contextlib.suppress(ConnectionError):
            await reader.read()
        ended.set()
        writer.close()

    server = await asyncio.start_server(serve, host, int(port), reuse_address=True)
    connection = await tcp.connect(address)
    await soon(ended.wait())
    server.close()
    await server.wait_closed()
    listener = await tcp.listen(address)
    peer, _ = await meet_again(connection, listener)
    assert listener.send(peer, [b"from a listener of ours"]) is Outcome.SENT
    assert await soon(connection.receive()) == [b"from a listener of ours"]


async def test_listener_that_sends_too_much(tcp: Bus) -> None:
    """A connection that is sent a part above the bound drops it, connects again, and goes on."""
    foreign = Foreign(zmq.ROUTER, "", [])
    try:
        port = foreign.socket.bind_to_random_port("tcp://127.0.0.1")
        connection = await tcp.connect(f"tcp://127.0.0.1:{port}")
        assert connection.send([b"hello"])
        first, _ = await soon(asyncio.to_thread(foreign.socket.recv_multipart))
        foreign.socket.send_multipart([first, bytes(MAX_PART_BYTES + 1)])
        receiving = tcp.spawn(connection.receive())
        foreign.socket.rcvtimeo = 0
        again: list[list[bytes]] = []

        def heard() -> bool:
            connection.send([b"hello"])
            with contextlib.suppress(zmq.Again):
                again.append(foreign.socket.recv_multipart())
            return bool(again) and again[-1][0] != first

        await until(heard)
        foreign.socket.send_multipart([again[-1][0], b"less"])
        assert await soon(receiving) == [b"less"]
    finally:
        foreign.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_descriptor_that_is_another_sockets_by_now(family: int, tmp_path: Path) -> None:
    with socket.socket(family) as listening, socket.socket(family) as peer:
        listening.bind(("127.0.0.1", 0) if family == socket.AF_INET else str(tmp_path / "listener"))
        listening.listen()
        peer.connect(listening.getsockname())
        with listening.accept()[0] as accepted:
            connection = AcceptedConnection(accepted.fileno(), local_address_of(listening), 0, 0.0)
            assert not connection.was_closed_by_peer()
            connection.connection.close()
        with pytest.raises(OSError, match="another connection"):
            AcceptedConnection(peer.fileno(), local_address_of(listening), 0, 0.0)


async def test_gate() -> None:
    looked: list[None] = []
    context = zmq.Context[zmq.Socket[bytes]]()
    gate = Authenticator(context)
    gate.before_answer.append(lambda: looked.append(None))
    asking = LoopSocket(context.socket(zmq.REQ), "asking")
    asking._socket.connect("inproc://zeromq.zap.01")
    for count in (1, 2):
        asking.send([b"1.0", b"%d" % count, b"tokenbus", b"127.0.0.1", b"", b"NULL"])
        properties = b"\x09Handshake\0\0\0\x01%d" % count
        assert await soon(asking.receive()) == [b"1.0", b"%d" % count, b"200", b"OK", b"", properties]
        assert len(looked) == count
    asking.close()
    await soon(gate.close())
    context.term()
