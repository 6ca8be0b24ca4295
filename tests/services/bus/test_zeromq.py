"""What only ZeroMQ has: foreign peers, socket files, options, processes."""

import asyncio
import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.services.bus.harness import MAX_PART_BYTES, SETTINGS, Bus, introduce, meet_again, soon, until
from tokenbus_services.bus import AddressError, Listener, Outcome, ZeroMQTransport, transport_for
from tokenbus_services.bus.gate import Gate
from tokenbus_services.bus.sockets import LoopSocket
from tokenbus_services.bus.zeromq import ZeroMQConnection, ZeroMQListener
from tokenbus_services.settings import BusSettings

Make = Callable[..., Bus]

SCRIPT = """
import asyncio, sys
from tokenbus_services.bus import ZeroMQTransport
from tokenbus_services.settings import BusSettings

async def main():
    listener = await ZeroMQTransport(BusSettings()).listen(sys.argv[1])
    print("listening", flush=True)
    while True:
        peer, parts = await listener.receive()
        listener.send(peer, parts)

asyncio.run(main())
"""


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Return what makes transports, of a kind and with settings."""
    made: list[Bus] = []

    def bus(kind: str, settings: BusSettings = SETTINGS) -> Bus:
        """Make one."""
        made.append(Bus(kind, tmp_path, settings))
        return made[-1]

    yield bus
    for each in made:
        await each.close()


@pytest.fixture
def ipc(make: Make) -> Bus:
    """Return a transport whose addresses are paths."""
    return make("zeromq-ipc")


@pytest.fixture
def tcp(make: Make) -> Bus:
    """Return a transport whose addresses are ports."""
    return make("zeromq-tcp")


def open_descriptors() -> int:
    """Return how many descriptors this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def files_in(folder: Path) -> list[str]:
    """Return the names of what is in a folder."""
    return [path.name for path in folder.iterdir()]


def path_of(address: str) -> Path:
    """Return where an address's socket is."""
    return Path(address.removeprefix("ipc://"))


def call(listener: Listener) -> socket.socket:
    """Return a plain socket that is connected to a listener."""
    host, port = listener.address.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)))


async def refusal_of(bus: Bus, foreign: Callable[[Listener], Any]) -> str:
    """Return the line that a foreign peer is refused with, while another goes on as before."""
    reasons: asyncio.Queue[str] = asyncio.Queue()
    listener = await bus.listen(refused=reasons.put_nowait)
    connection = await bus.connect(listener.address)
    peer = await introduce(connection, listener)
    stranger = foreign(listener)
    try:
        reason = await soon(reasons.get())
    finally:
        stranger.close()
    assert connection.send([b"still here"])
    assert await soon(listener.receive()) == (peer, [b"still here"])
    assert listener.send(peer, [b"so am I"]) is Outcome.SENT
    assert await soon(connection.receive()) == [b"so am I"]
    await soon(connection.close())
    await soon(listener.close())
    assert reasons.empty()
    return reason


def sending(data: bytes) -> Callable[[Listener], socket.socket]:
    """Return what connects and sends some bytes."""

    def connect(listener: Listener) -> socket.socket:
        """Connect and send."""
        stranger = call(listener)
        stranger.sendall(data)
        return stranger

    return connect


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
    """What is not this protocol is refused, once, never received, and disturbs nobody."""
    reason = await refusal_of(tcp, sending(data))
    assert re.match(r"(a peer|127\.0\.0\.1:\d+): ", reason)
    assert re.search("what it sent is not this protocol|its handshake is not of this protocol", reason)


async def test_peer_that_says_nothing(make: Make) -> None:
    """Who connects and says nothing is turned away after the heartbeat's timeout."""
    settings = replace(SETTINGS, heartbeat_interval_ms=10, heartbeat_timeout_ms=50)
    bus = make("zeromq-tcp", settings)
    assert (await refusal_of(bus, call)).endswith(": no handshake within 50 ms")


async def test_peer_that_leaves_at_once(tcp: Bus) -> None:
    """Who connects and leaves, as a port scan does, is told as that."""

    def knock(listener: Listener) -> socket.socket:
        """Connect and leave."""
        stranger = call(listener)
        stranger.close()
        return stranger

    assert (await refusal_of(tcp, knock)).endswith("it left before the handshake was done")


class Foreign:
    """A ZeroMQ socket that is not ours, and so sends what ours would not."""

    def __init__(self, kind: int, address: str, parts: list[bytes]) -> None:
        """Connect once, and send a message if there is one."""
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if address:
            self.socket.connect(address)
        if parts:
            self.socket.send_multipart(parts)

    def close(self) -> None:
        """Leave."""
        self.socket.close(linger=0)
        self._context.term()


@pytest.mark.parametrize("kind", ["zeromq-ipc", "zeromq-tcp"])
@pytest.mark.parametrize("surplus", [1, 5_000_000])
async def test_part_that_is_too_large(make: Make, kind: str, surplus: int) -> None:
    """A peer that sends a part above the bound is cut off, with a reason, and nobody else is."""
    bus = make(kind)
    parts = [b"small", bytes(MAX_PART_BYTES + surplus)]
    reason = await refusal_of(bus, lambda listener: Foreign(zmq.DEALER, listener.address, parts))
    assert f"a part above {MAX_PART_BYTES} bytes" in reason


async def test_listener_that_speaks_something_else(tcp: Bus) -> None:
    """A connection takes nothing from a server that is not ours, and finds ours when it comes."""
    address = tcp.address()
    host, port = address.removeprefix("tcp://").split(":")
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Say something else, and wait for the end."""
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
            """Tell whether the connection has come back."""
            connection.send([b"hello"])
            with contextlib.suppress(zmq.Again):
                again.append(foreign.socket.recv_multipart())
            return bool(again) and again[-1][0] != first

        await until(heard)
        foreign.socket.send_multipart([again[-1][0], b"less"])
        assert await soon(receiving) == [b"less"]
    finally:
        foreign.close()


async def test_many_foreign_peers(tcp: Bus) -> None:
    """Each of many peers that speak something else at once is told."""
    reasons: list[str] = []
    listener = await tcp.listen(refused=reasons.append)
    strangers = [sending(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")(listener) for _ in range(40)]
    await until(lambda: len(reasons) == len(strangers))
    for stranger in strangers:
        stranger.close()


async def test_gate() -> None:
    """Everybody is let in, but not before whoever watches has looked at the connections."""

    class Watcher:
        """Counts how often it was asked to look."""

        looked = 0

        def catch_up(self) -> None:
            """Count."""
            self.looked += 1

    context = zmq.Context[zmq.Socket[bytes]]()
    gate = Gate(context)
    watcher = Watcher()
    gate.watchers.append(watcher)
    asking = LoopSocket(context.socket(zmq.REQ), "asking")
    asking._socket.connect("inproc://zeromq.zap.01")
    for count in (1, 2):
        asking.send([b"1.0", b"%d" % count, b"tokenbus", b"127.0.0.1", b"", b"NULL"])
        assert await soon(asking.receive()) == [b"1.0", b"%d" % count, b"200", b"OK", b"", b""]
        assert watcher.looked == count
    asking.close()
    await soon(gate.close())
    context.term()


async def test_callback_that_fails(tcp: Bus) -> None:
    """An error of the callback's goes to the loop's handler, and the next peer is told all the same."""
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

    def fail(reason: str) -> None:
        """Fail."""
        raise ValueError(reason)

    listener = await tcp.listen(refused=fail)
    for count in (1, 2):
        with sending(b"GET / HTTP/1.1\r\n\r\n")(listener):
            await until(lambda count=count: len(errors) == count)  # type: ignore[misc]
    await soon(listener.close())
    assert all(isinstance(context["exception"], ValueError) for context in errors)


async def test_stale_socket_file(ipc: Bus) -> None:
    """A socket file that nobody listens at any more is no obstacle."""
    address = ipc.address()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path_of(address)))
        dead.listen()
    assert path_of(address).is_socket()
    listener = await ipc.listen(address)
    await introduce(await ipc.connect(address), listener)


async def test_socket_of_a_stranger(ipc: Bus) -> None:
    """A path at which something else listens is not taken away from it."""
    address = ipc.address()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path_of(address)))
        other.listen()
        with pytest.raises(AddressError, match="taken: something listens there already"):
            await ipc.transport.listen(address)
        assert path_of(address).is_socket()


async def test_file_that_is_no_socket(ipc: Bus) -> None:
    """A file or folder at the path is left alone, and told."""
    for make in (Path.touch, Path.mkdir):
        address = ipc.address()
        make(path_of(address))
        with pytest.raises(AddressError, match="something else than a socket"):
            await ipc.transport.listen(address)
        assert path_of(address).exists()


async def test_files_of_a_closed_listener(ipc: Bus, tmp_path: Path) -> None:
    """A closed listener leaves no file, and neither does one that was refused."""
    listener = await ipc.listen()
    with pytest.raises(AddressError):
        await ipc.transport.listen(listener.address)
    await soon(listener.close())
    with pytest.raises(AddressError):
        await ipc.transport.listen(f"ipc://{tmp_path}/missing/x")
    assert not files_in(tmp_path)


async def test_files_that_are_another_s_by_now(ipc: Bus) -> None:
    """A listener whose files were removed by hand does not remove its successor's when it closes."""
    address = ipc.address()
    first = await ipc.listen(address)
    path_of(address).unlink()
    path_of(f"{address}.lock").unlink()
    second = await ipc.listen(address)
    await soon(first.close())
    connection = await ipc.connect(address)
    await introduce(connection, second)
    with pytest.raises(AddressError, match="taken"):
        await ipc.transport.listen(address)


@pytest.mark.parametrize("kind", ["zeromq-ipc", "zeromq-tcp"])
async def test_process_that_is_killed(make: Make, kind: str) -> None:
    """A process that is killed keeps its address no longer, and its connections find whoever listens next."""
    bus = make(kind)
    address = bus.address()
    connection = await bus.connect(address)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SCRIPT, address, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await soon(process.stdout.readline()) == b"listening\n"
        assert connection.send([b"echo"])
        assert await soon(connection.receive()) == [b"echo"]
        with pytest.raises(AddressError, match="taken"):
            await bus.transport.listen(address)
    finally:
        process.kill()
        await process.wait()
    listener = await bus.listen(address)
    await meet_again(connection, listener)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://127.0.0.1", "expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1:65536", "a port of at most 65535, got 65536"),
        ("tcp://:5570", "expected tcp://HOST:PORT"),
        ("tcp://a b:5570", "expected tcp://HOST:PORT"),
        ("tcp://lo;127.0.0.1:5570", "expected tcp://HOST:PORT"),
        ("ipc://", "expected ipc://PATH"),
        ("ipc://*", "expected ipc://PATH"),
        ("ipc://@abstract", "expected ipc://PATH"),
        ("ipc:///tmp/\0", "expected ipc://PATH"),
        ("ipc:///tmp/" + "x" * 103, "a path of at most 107 bytes, got 108"),
    ],
)
async def test_address_that_is_none(tcp: Bus, address: str, reason: str) -> None:
    """What cannot be an address is told as that, to who listens and to who connects."""
    for use in (tcp.transport.listen, tcp.transport.connect):
        with pytest.raises(AddressError) as refused:
            await use(address)
        assert refused.value.reason == reason


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://192.0.2.1:0", "no address of this machine"),  # a network that is kept for examples
        ("tcp://host.invalid:0", "no such host here: "),
        ("ipc:///nonexistent/x", "no such directory"),
        ("ipc:///dev/null/x", "no such directory"),
    ],
)
async def test_address_that_is_elsewhere(tcp: Bus, address: str, reason: str) -> None:
    """An address that this machine does not have is told as that to who listens."""
    with pytest.raises(AddressError) as refused:
        await soon(tcp.transport.listen(address))
    assert refused.value.reason.startswith(reason)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://localhost:0", "tcp://*:0"])
async def test_port_that_is_left_open(tcp: Bus, address: str) -> None:
    """A listener says which port it was given, and hosts may be names; nobody can connect to an open port."""
    listener = await tcp.listen(address)
    port = int(listener.address.rpartition(":")[2])
    assert port > 0
    await introduce(await tcp.connect(f"tcp://localhost:{port}"), listener)
    with pytest.raises(AddressError):
        await tcp.transport.connect(address if "*:" in address else "tcp://127.0.0.1:0")


async def test_options() -> None:
    """Every socket has what the settings say, and what keeps libzmq from waiting, growing or aborting."""
    settings = BusSettings(
        high_water_mark=11,
        linger_ms=12,
        max_part_bytes=13,
        heartbeat_interval_ms=2000,
        heartbeat_timeout_ms=6000,
        reconnect_ms=16,
        reconnect_max_ms=17,
    )
    transport = transport_for(settings)
    assert isinstance(transport, ZeroMQTransport)
    listener = await transport.listen("tcp://127.0.0.1:0")
    connection = await transport.connect(listener.address)
    assert isinstance(listener, ZeroMQListener)
    assert isinstance(connection, ZeroMQConnection)
    for side in (listener, connection):
        options = side._socket._socket
        assert options.getsockopt(zmq.SNDHWM) == options.getsockopt(zmq.RCVHWM) == 11
        assert options.getsockopt(zmq.LINGER) == 12
        assert options.getsockopt(zmq.MAXMSGSIZE) == 13
        assert options.getsockopt(zmq.HANDSHAKE_IVL) == options.getsockopt(zmq.CONNECT_TIMEOUT) == 6000
        assert options.getsockopt(zmq.RECONNECT_IVL) == 16
        assert options.getsockopt(zmq.RECONNECT_IVL_MAX) == 17
        assert options.getsockopt(zmq.TCP_KEEPALIVE) == 1
        assert options.getsockopt(zmq.TCP_KEEPALIVE_IDLE) == options.getsockopt(zmq.TCP_KEEPALIVE_INTVL) == 2
        assert options.getsockopt(zmq.TCP_KEEPALIVE_CNT) == 2
        assert options.getsockopt(zmq.TCP_MAXRT) == 6000
        assert options.getsockopt(zmq.HEARTBEAT_IVL) == 0  # as the comment in zeromq.py says
        assert options.getsockopt(zmq.ZAP_DOMAIN) == b"tokenbus"
    await connection.close()
    await listener.close()


async def test_what_is_held_while_nothing_is_open(make: Make) -> None:
    """When all of a transport is closed it holds no descriptor, whoever was refused or left meanwhile."""
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
    assert open_descriptors() == before


async def test_close_without_anybody_there(make: Make) -> None:
    """A connection that holds what nobody takes closes after the linger, and its transport holds nothing."""
    bus = make("zeromq-ipc", replace(SETTINGS, linger_ms=0))
    connection = await bus.connect(bus.address())
    assert connection.send([b"to nobody"])
    await soon(connection.close())
    assert isinstance(bus.transport, ZeroMQTransport)
    assert not bus.transport._connecting.is_open
