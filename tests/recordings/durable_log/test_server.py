"""The connection to a log's servers: those that die, stand still, refuse or are none."""

import asyncio
import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.recordings.durable_log.using import log_settings
from tests.support.nats import NatsServer
from tests.support.waiting import soon, turns, until
from tokenbus.bus import AddressError
from tokenbus.recordings.durable_log import require_nats
from tokenbus.recordings.durable_log.server import Servers, end_tasks, parse
from tokenbus.recordings.durable_log.stream import LogStream
from tokenbus.settings import BusSettings, DurableLogSettings, Settings

pytestmark = pytest.mark.process
_HOUR_MS = 3_600_000
Start = Callable[..., NatsServer]


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


def servers_of(*made: NatsServer, **overrides: object) -> Servers:
    return servers(log_settings(made[0], **overrides), *(server.server for server in made))


def servers(settings: Settings, *hosts: str) -> Servers:
    return Servers(parse(f"nats://{','.join(hosts)}/log", settings), settings)


async def refusal_of(stream: LogStream) -> str:
    untried = stream.reason
    connecting = asyncio.create_task(stream.connect())
    await until(lambda: stream.reason != untried)
    await end_tasks(connecting)
    assert connecting.cancelled()
    return stream.reason


async def test_server_is_given_up_after_its_silence(start: Start) -> None:
    server = start()
    quick = {"bus__heartbeat_ms": 100, "bus__heartbeat_timeout_ms": 500}
    connection = await soon(servers_of(server, **quick).connect())
    server.pause()
    await soon(connection.lost.wait())
    assert connection.reason == "no answer within 500 ms"
    server.resume()
    await soon(connection.close())


async def test_server_that_failed_is_tried_last(start: Start) -> None:
    made = start(), start()
    found = servers_of(*made, bus__heartbeat_timeout_ms=_HOUR_MS)
    connection = await soon(found.connect())
    assert connection.client.connected_url is not None
    (bad,) = [each for each in made if each.port == connection.client.connected_url.port]
    bad.kill()
    await soon(connection.lost.wait())
    bad.start()
    bad.pause()  # who tried it would wait for an hour
    other = await soon(found.connect())
    assert other.client.connected_url is not None
    assert other.client.connected_url.port != bad.port
    for each in (connection, other):
        await soon(each.close())


@pytest.mark.parametrize(
    "greeting", [pytest.param(b"x" * 300_000, id="long"), b"INFO 5\r\n", b"INFO {]\r\n", b"\xff\r\n"]
)
async def test_port_that_is_no_nats_server(greeting: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(greeting)
            await reader.read()
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        reason = await refusal_of(LogStream(Settings(), f"nats://127.0.0.1:{port}"))
    assert re.fullmatch(rf"127\.0\.0\.1:{port}: .+", reason)


async def test_pause_after_a_connection_that_was_lost_soon(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """A server that closes each connection is not kept busy; the log and the next error say why it does so."""
    server = start("max_subscriptions: 1\n")
    settings = log_settings(server)
    settings = replace(settings, bus=replace(settings.bus, reconnect_ms=_HOUR_MS, reconnect_max_ms=_HOUR_MS,
                                             heartbeat_timeout_ms=_HOUR_MS))  # fmt: skip
    found = servers(settings, server.server)
    connection = await soon(found.connect())
    for subject in ("a", "b"):
        await connection.client.subscribe(subject)
    await soon(connection.lost.wait())
    assert caplog.text.count('nats server lost reason="maximum subscriptions exceeded"') == 1
    again = asyncio.create_task(found.connect())
    await turns(1000)
    assert not again.done()
    assert found.reason == "maximum subscriptions exceeded"
    assert len(set(re.findall(r"cid:(\d+)", (server.folder / "nats.log").read_text()))) == 1
    again.cancel()
    await soon(connection.close())


async def test_close_that_is_cancelled_leaves_nothing_behind(start: Start) -> None:
    server = start()
    before = asyncio.all_tasks()
    connection = await soon(servers_of(server).connect())
    server.pause()
    connection._transport.write(bytes(16_000_000))  # type: ignore[no-untyped-call]  # more than the sockets take
    closing = asyncio.create_task(connection.close())
    await turns()
    assert not closing.done()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(closing)
    assert connection.lost.is_set()
    await until(lambda: asyncio.all_tasks() <= before)
    server.resume()


async def test_without_nats_py(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nats-py an address is refused in one line that says what to install."""
    monkeypatch.setitem(sys.modules, "nats", None)
    with pytest.raises(AddressError, match=r"nats-py is not installed \(pip install 'tokenbus\[nats\]'\)"):
        require_nats("nats://127.0.0.1:4222/log")


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://127.0.0.1:4222/log", "expected nats://HOST:PORT/NAME"),
        ("nats://127.0.0.1:4222/a.b", "expected nats://HOST:PORT/NAME"),
        ("nats://127.0.0.1/log", "each server needs a host and a port"),
        ("nats://*:4222/log", "each server needs a host and a port"),
        ("nats://127.0.0.1:0/log", "each server needs a host and a port"),
        (f"nats://{','.join(['127.0.0.1:1'] * 17)}/log", "at most 16 servers, got 17"),
        ("nats://127.0.0.1:1,192.0.2.1:1/log", r"beyond loopback it needs tls:// and durable_log\.credentials"),
        ("tls://192.0.2.1:4222/log", r"beyond loopback it needs tls:// and durable_log\.credentials"),
    ],
)
def test_address_that_cannot_be_used(address: str, reason: str) -> None:
    with pytest.raises(AddressError, match=reason):
        parse(address, Settings())


def test_addresses() -> None:
    """Beyond loopback TLS and credentials are needed, unless the settings say otherwise."""
    parsed = parse("tls://a:1,[::1]:2/log-1", Settings(durable_log=DurableLogSettings(credentials="file")))
    assert ([str(each) for each in parsed.servers], parsed.name, parsed.is_tls) == (
        ["tcp://a:1", "tcp://[::1]:2"],
        "log-1",
        True,
    )
    assert parse("tls://a:1/log", Settings(durable_log=DurableLogSettings(certificate="file"))).is_tls
    assert not parse("nats://a:1/log", Settings(bus=BusSettings(insecure=True))).is_tls
