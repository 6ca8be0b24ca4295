"""What only NATS has: servers that die, stand still or refuse, and payloads that are smaller than messages."""

import asyncio
import contextlib
import re
import socket
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from nats.aio.client import Client

from tests.services.bus.harness import introduce, meet_again
from tests.services.bus.nats_ends import QUICK, Ends, Start, ends, line_to, start
from tests.support.nats import NatsServer
from tests.support.waiting import soon, turns, until
from tokenbus_services.bus import AddressError, MessageError, Outcome, transport_for
from tokenbus_services.bus.addresses import parse_nats
from tokenbus_services.bus.nats_server import Servers, end_tasks

__all__ = ["ends", "start"]
pytestmark = pytest.mark.process
_HOUR_MS = 3_600_000


async def test_server_that_is_killed(start: Start, ends: Ends) -> None:
    server = start()
    listener = await ends.listen(server.address("workers"))
    connection = await ends.connect(listener.address)
    old = await introduce(connection, listener)
    for _ in range(3):
        server.kill()
        await until(lambda: not listener.is_reachable())
        await until(lambda old=old: listener.send(old, [b"x"]) is Outcome.GONE)  # type: ignore[misc]
        server.start()
        peer, _ = await meet_again(connection, listener)
        assert peer != old
        assert listener.send(peer, [b"welcome"]) is Outcome.SENT
        assert await soon(connection.receive()) == [b"welcome"]
        old = peer
    assert ends.reasons == []


async def test_server_that_stands_still(start: Start, ends: Ends) -> None:
    server = start()
    listener = await ends.listen(server.address("workers"))
    connection = await ends.connect(listener.address)
    old = await introduce(connection, listener)
    server.pause()
    await until(lambda: not listener.is_reachable())
    await until(lambda: listener.send(old, [b"x"]) is Outcome.GONE)
    server.resume()
    peer, _ = await meet_again(connection, listener)
    assert peer != old


async def test_server_is_given_up_after_the_silence_of_a_peer(start: Start) -> None:
    server = start()
    connection = await soon(Servers(parse_nats(server.address("x")), QUICK).connect())
    server.pause()
    await soon(connection.lost.wait())
    assert connection.reason == "no answer within 1000 ms"
    server.resume()
    await soon(connection.close(0))


async def test_server_that_failed_is_tried_last(start: Start) -> None:
    """What one connection of a process learned of a server, the next one need not find out: it would wait as long."""
    bad, good = start(), start()
    both = parse_nats(f"nats://{bad.server},{good.server}/x")
    (failed,) = [each for each in both.servers if each.port == bad.port]
    bad.pause()
    patient = replace(QUICK, heartbeat_timeout_ms=3_600_000)
    for _ in range(8):  # each has an order of its own
        connection = await soon(Servers(both, patient, failed={failed: 0.0}).connect())
        await soon(connection.close(0))
    bad.resume()


async def test_close_while_the_server_stands_still(start: Start, ends: Ends) -> None:
    server = start()
    listener = await ends.listen(server.address("workers"))
    connection = await ends.connect(listener.address)
    peer = await introduce(connection, listener)
    server.pause()
    while connection.send([bytes(100_000)]) and listener.send(peer, [bytes(100_000)]) is Outcome.SENT:
        pass
    await soon(asyncio.gather(connection.close(), listener.close()))


async def test_messages_above_the_servers_payload(start: Start, ends: Ends) -> None:
    """Messages far larger than the server's payloads go in parts, and arrive whole and in order."""
    server = start("max_payload: 1024\n")
    listener = await ends.listen(server.address("workers"))
    connection = await ends.connect(listener.address)
    peer = await introduce(connection, listener)
    sent = [[bytes([number]) * size for size in (0, 900, 300_000, number)] for number in range(8)]
    for parts in sent:
        await until(lambda parts=parts: connection.send(parts))  # type: ignore[misc]
        await until(lambda parts=parts: listener.send(peer, parts) is Outcome.SENT)  # type: ignore[misc]
    for parts in sent:
        assert await soon(listener.receive()) == (peer, parts)
        assert await soon(connection.receive()) == parts


async def test_payload_that_is_too_small(start: Start, ends: Ends) -> None:
    server = start("max_payload: 512\n")
    with pytest.raises(AddressError, match="its max_payload is 512 bytes, at least 1024 are needed"):
        await ends.listen(server.address("workers"))


async def test_message_that_is_too_large(start: Start, ends: Ends) -> None:
    """A message above what a peer may have pending, or of too many parts, is an error of its sender's."""
    server = start()
    connection = await ends.connect(server.address("workers"), replace(QUICK, max_pending_bytes=600_000))
    with pytest.raises(MessageError, match="at most 600000 bytes, got 900016"):
        connection.send([bytes(300_000)] * 3)
    with pytest.raises(MessageError, match="at most 1024 parts, got 1025"):
        connection.send([b""] * 1025)


async def test_no_server(ends: Ends) -> None:
    with pytest.raises(AddressError, match=r"no server answers within 2 s: 127.0.0.1:1: connection refused"):
        await ends.listen("nats://127.0.0.1:1/workers")
    connection = await ends.connect("nats://127.0.0.1:1/workers")
    assert connection.send([b"x"])


@pytest.mark.parametrize("greeting", [b"x" * 300_000, b"INFO 5\r\n", b"INFO {]\r\n", b"\xff\r\n"])
async def test_port_that_is_no_nats_server(ends: Ends, greeting: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(greeting)
            await reader.read()
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(AddressError, match=rf"no server answers within 2 s: 127\.0\.0\.1:{port}: .+"):
            await ends.listen(f"nats://127.0.0.1:{port}/workers")


async def test_server_that_closes_each_connection(start: Start, ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    """The log says why, in one line however often it happens, and so does the error of who waits for the server."""
    server = start("max_subscriptions: 2\n")
    with pytest.raises(AddressError, match="no server answers within 2 s: maximum subscriptions exceeded"):
        await ends.listen(server.address("workers"))
    assert caplog.text.count("nats server lost") == 1
    assert 'reason="maximum subscriptions exceeded"' in caplog.text


async def test_pause_after_a_connection_that_was_lost_soon(
    start: Start, ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    hour = 3_600_000
    patient = replace(QUICK, heartbeat_timeout_ms=hour, reconnect_ms=hour, reconnect_max_ms=hour)
    server = start("max_subscriptions: 2\n")
    listening = asyncio.create_task(ends.listen(server.address("workers"), patient))
    await until(lambda: "nats server lost" in caplog.text)
    await turns(1000)
    assert len(set(re.findall(r"cid:(\d+)", (server.folder / "nats.log").read_text()))) == 1
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


async def test_use_of_a_connection_that_fails(start: Start, ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    """A defect while a connection is used is logged, and another connection is made: an end never stops to hear."""
    server = start()
    listener = await ends.listen(server.address("workers"))
    connection = await ends.connect(listener.address)
    await introduce(connection, listener)
    look_after_peers = listener._look_after_peers  # type: ignore[attr-defined]

    def fail() -> None:
        listener._look_after_peers = look_after_peers  # type: ignore[attr-defined]
        raise RuntimeError("no peers today")

    listener._look_after_peers = fail  # type: ignore[attr-defined]
    await until(lambda: "no peers today" in caplog.text)
    await meet_again(connection, listener)


async def test_hole(start: Start, ends: Ends) -> None:
    """A frame that is lost ends the conversation: the next is another peer's, and nothing is missing inside either."""
    server = start()
    listener = await ends.listen(server.address("workers"))
    connection = await ends.connect(listener.address)
    peer = await introduce(connection, listener)
    conversation = connection._current  # type: ignore[attr-defined]
    assert connection.send([b"before"])
    conversation._sent += 1  # as if a server had dropped it
    assert connection.send([b"after"])
    assert await soon(listener.receive()) == (peer, [b"before"])
    other, late = await meet_again(connection, listener)
    assert other != peer
    assert late == []
    assert listener.send(peer, [b"x"]) is Outcome.GONE
    assert any("frame 4 came, expected 3" in reason for reason in ends.reasons)


async def test_peer_that_dies(start: Start, ends: Ends) -> None:
    """A peer whose process dies without a word is gone as soon as the server knows, although nothing is sent to it."""
    server = start()
    listener = await ends.listen(server.address("workers"))
    async with line_to(server) as (proxy, address):
        connection = await ends.connect(address)
        await introduce(connection, listener)
        proxy.cut()
        await until(lambda: listener.usage().admitted == 0)
        await soon(connection.close())


async def test_listener_is_back_as_soon_as_it_is_connected(start: Start, ends: Ends) -> None:
    """A listener that lost its server welcomes peers once it has one, and those that it had learn at once of the loss.

    Neither waits until a heartbeat is missed: another server that stands still seems to hear for it, and says nothing.
    """
    patient = replace(QUICK, heartbeat_interval_ms=_HOUR_MS // 2, heartbeat_timeout_ms=_HOUR_MS)
    server, mute = start(), Client()
    async with line_to(server) as (proxy, address):
        listener = await ends.listen(address, patient)
        connection = await ends.connect(server.address("workers"), patient)
        old = await introduce(connection, listener)
        await mute.connect(server.server)
        await mute.subscribe("tokenbus.workers.>")
        await mute.flush()
        proxy.cut()
        await until(lambda: not listener.is_reachable())
        proxy.restore()
        await until(lambda: listener.usage().unadmitted == 1)  # the old peer, which has sent nothing
        peer, _ = await meet_again(connection, listener)
        assert peer != old
        await introduce(await ends.connect(server.address("workers"), patient), listener)
        await soon(listener.close())
        await soon(mute.close())


@pytest.mark.parametrize("is_full", [False, True])
async def test_listener_that_dies(start: Start, ends: Ends, *, is_full: bool) -> None:
    """A connection, also one that may send nothing more, finds the next listener after one that left without a word."""
    server = start()
    async with line_to(server) as (proxy, address):
        first = await ends.listen(address)
        connection = await ends.connect(server.address("workers"), replace(QUICK, high_water_mark=8))
        old = await introduce(connection, first)
        while is_full and connection.send([bytes(100_000)]):
            pass
        proxy.cut()
        peer, _ = await meet_again(connection, await ends.listen(server.address("workers")))
        assert peer != old
        await soon(first.close())


async def test_close_that_is_cancelled_leaves_nothing_behind(start: Start) -> None:
    server = start()
    before = asyncio.all_tasks()
    connection = await soon(Servers(parse_nats(server.address("x")), QUICK).connect())
    connection.subscribe("somewhere", lambda *_: None)
    server.pause()
    connection.publish("somewhere", "", bytes(1000))
    closing = asyncio.create_task(connection.close(3600))
    await turns()
    assert not closing.done()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(closing)
    assert connection.lost.is_set()
    await until(lambda: asyncio.all_tasks() <= before)
    server.resume()


async def test_without_nats_py(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nats-py a nats address is refused in one line that says what to install, and others are used as ever."""
    monkeypatch.setitem(sys.modules, "nats", None)
    transport = transport_for(QUICK)
    with pytest.raises(AddressError, match=r"nats-py is not installed \(pip install 'tokenbus\[nats\]'\)"):
        await transport.connect("nats://127.0.0.1:4222/workers")
    await soon((await transport.listen("tcp://127.0.0.1:0")).close())


async def test_scheme_chooses_the_transport(start: Start) -> None:
    server = start()
    transport = transport_for(QUICK)
    for address in (server.address("workers"), "tcp://127.0.0.1:0"):
        listener = await soon(transport.listen(address))
        connection = await soon(transport.connect(listener.address))
        await introduce(connection, listener)
        await soon(asyncio.gather(connection.close(), listener.close()))


async def test_cluster(tmp_path: Path, ends: Ends) -> None:
    with ExitStack() as stack:
        routes = [reserved(stack) for _ in range(3)]
        urls = ", ".join(f"nats://127.0.0.1:{port}" for port in routes)
        servers = []
        for number, port in enumerate(routes):
            folder = tmp_path / str(number)
            folder.mkdir()
            config = f"server_name: s{number}\ncluster: {{ name: c, listen: '127.0.0.1:{port}', routes: [{urls}] }}\n"
            servers.append(NatsServer(folder, config))
            stack.callback(servers[-1].kill)
        address = f"nats://{','.join(server.server for server in servers)}/workers"
        listener = await ends.listen(address)
        connection = await ends.connect(address)
        await meet_again(connection, listener)
        for server in servers:
            server.kill()
            await meet_again(connection, listener)
            server.start()
        for server in servers:
            server.pause()
            await meet_again(connection, listener)
            server.resume()


def reserved(stack: ExitStack) -> int:
    found = stack.enter_context(socket.socket())
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("127.0.0.1", 0))
    return int(found.getsockname()[1])


async def test_task_that_swallows_cancellations_is_ended() -> None:
    swallowed = 0

    async def swallow() -> None:
        nonlocal swallowed
        for _ in range(2):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed += 1
        await asyncio.Event().wait()

    task = asyncio.create_task(swallow())
    await asyncio.sleep(0)
    await soon(end_tasks(task))
    assert task.cancelled()
    assert swallowed == 2
