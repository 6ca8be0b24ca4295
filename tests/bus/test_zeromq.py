"""What only ZeroMQ has: options, processes, and what is held open."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from tests.bus.foreign import sending
from tests.bus.harness import SETTINGS, Bus, introduce
from tests.support.waiting import soon, until
from tokenbus.bus import ZeroMQTransport
from tokenbus.bus.zeromq import ZeroMQConnection, ZeroMQListener
from tokenbus.settings import BusSettings

Make = Callable[..., Bus]


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_options() -> None:
    """Every socket has what the settings say, and what keeps libzmq from waiting, growing or aborting."""
    settings = BusSettings(
        high_water_mark=11, linger_ms=12, max_part_bytes=13, heartbeat_ms=2000, heartbeat_timeout_ms=6000,
        reconnect_ms=100, reconnect_max_ms=200,
    )  # fmt: skip
    transport = ZeroMQTransport(settings)
    listener = await transport.listen("tcp://127.0.0.1:0")
    connection = await transport.connect(listener.address)
    assert isinstance(listener, ZeroMQListener)
    assert isinstance(connection, ZeroMQConnection)
    for side in (listener, connection):
        options = side._socket._socket
        assert options.getsockopt(zmq.SNDHWM) == options.getsockopt(zmq.RCVHWM) == 11
        assert options.getsockopt(zmq.LINGER) == 12
        assert options.getsockopt(zmq.MAXMSGSIZE) == 13
        assert options.getsockopt(zmq.CONNECT_TIMEOUT) == 6000
        assert options.getsockopt(zmq.HANDSHAKE_IVL) == 60_000
        assert options.getsockopt(zmq.RECONNECT_IVL) in range(50, 101)
        assert options.getsockopt(zmq.RECONNECT_IVL_MAX) in range(100, 201)
        assert options.getsockopt(zmq.TCP_KEEPALIVE) == 1
        assert options.getsockopt(zmq.TCP_KEEPALIVE_IDLE) == options.getsockopt(zmq.TCP_KEEPALIVE_INTVL) == 2
        assert options.getsockopt(zmq.TCP_KEEPALIVE_CNT) == 2
        assert options.getsockopt(zmq.TCP_MAXRT) == 6000
        assert options.getsockopt(zmq.HEARTBEAT_IVL) == 0  # as the comment in zeromq.py says
        assert options.getsockopt(zmq.ZAP_DOMAIN) == b"tokenbus"
    await connection.close()
    await listener.close()


@pytest.mark.parametrize("interval_ms", [1, 1000, 3_600_000 // 3])
async def test_longest_silence_is_allowed(make: Make, interval_ms: int) -> None:
    """Peers meet over TCP with the longest `heartbeat_timeout_ms`: the kernel takes what keepalive is made of it."""
    settings = replace(SETTINGS, heartbeat_ms=interval_ms, heartbeat_timeout_ms=3_600_000)
    await make("zeromq-tcp", settings).pair()


async def test_what_is_held_while_nothing_is_open(make: Make) -> None:
    """When all of a transport is closed it holds no descriptor, whichever peers were refused or left meanwhile."""
    bus = make("zeromq-tcp")
    before = open_descriptors()
    reasons: list[str] = []
    listener = await bus.listen(refused=reasons.append)
    connections = [await bus.connect(listener.address) for _ in range(5)]
    for connection in connections:
        await introduce(connection, listener)
    with sending(b"GET / HTTP/1.1\r\n\r\n")(listener):
        await until(lambda: bool(reasons))
    await bus.close()
    assert open_descriptors() <= before  # what an earlier test held may be closed meanwhile


async def test_close_without_anybody_there(make: Make) -> None:
    """A connection that holds messages for an absent peer closes after the linger, and its transport holds nothing."""
    bus = make("zeromq-ipc", replace(SETTINGS, linger_ms=0))
    connection = await bus.connect(bus.address())
    assert connection.send([b"to nobody"])
    await soon(connection.close())
    assert isinstance(bus.transport, ZeroMQTransport)
    assert not bus.transport._connecting._context
