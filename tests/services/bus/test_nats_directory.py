"""The listeners of a group announce themselves over NATS, and those that look for them learn who comes and goes."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.services.bus.harness import introduce
from tests.services.bus.nats_ends import QUICK, Ends, Start, ends, line_to, start
from tests.support.nats import NatsServer
from tests.support.waiting import soon, until
from tokenbus_services.bus import AddressError
from tokenbus_services.bus.addresses import member_address, parse_nats
from tokenbus_services.bus.nats import NatsTransport
from tokenbus_services.bus.nats_directory import NatsDirectory
from tokenbus_services.bus.nats_server import ServerConnection, Servers

__all__ = ["ends", "start"]
pytestmark = pytest.mark.process


def look(ends: Ends, address: str, changed: Callable[[], None] = lambda: None) -> NatsDirectory:
    directory = NatsTransport(QUICK).directory(address, changed)
    ends.cleanup.push_async_callback(directory.close)
    return directory


async def speaker(ends: Ends, server: NatsServer) -> ServerConnection:
    connection = await soon(Servers(parse_nats(server.address("x")), QUICK).connect())
    ends.cleanup.push_async_callback(connection.close, 0)
    return connection


async def test_listeners_are_found_with_their_peers(start: Start, ends: Ends) -> None:
    server = start()
    group = server.address("workers.*")
    first = await ends.listen(server.address("workers.p0"))
    directory = look(ends, group)
    await until(lambda: directory.listeners == {first.address: 0})
    second = await ends.listen(server.address("workers.p1"))
    await ends.listen(server.address("clients.p1"))
    await ends.listen(server.address("workers"))
    await introduce(await ends.connect(first.address), first)
    await until(lambda: directory.listeners == {first.address: 1, second.address: 0})


async def test_listener_that_leaves_is_forgotten_at_once(start: Start, ends: Ends) -> None:
    server = start()
    directory = look(ends, server.address("workers.*"))
    first, second = [await ends.listen(server.address(f"workers.p{number}")) for number in range(2)]
    peer = await introduce(connection := await ends.connect(first.address), first)
    await until(lambda: len(directory.listeners) == 2)
    first.retire()
    await until(lambda: directory.listeners == {second.address: 0})
    first.send(peer, [b"still here"])
    assert await soon(connection.receive()) == [b"still here"]
    await soon(second.close())
    await until(lambda: not directory.listeners)


async def test_listener_that_dies_is_forgotten(start: Start, ends: Ends) -> None:
    server = start()
    directory = look(ends, server.address("workers.*"))
    async with line_to(server) as (proxy, address):
        listener = await ends.listen(f"{address}.p0")
        await until(lambda: directory.listeners)
        proxy.cut()
        await until(lambda: not directory.listeners)
        await soon(listener.close())


async def test_server_that_is_away_ends_no_listener(start: Start, ends: Ends) -> None:
    server = start()
    seen: list[int] = []
    directory = look(ends, server.address("workers.*"), lambda: seen.append(len(directory.listeners)))
    listener = await ends.listen(server.address("workers.p0"))
    await until(lambda: directory.listeners)
    for _ in range(2):
        server.kill()
        await until(lambda: directory.server is None and not listener.is_reachable())
        server.start()
        await until(lambda: directory.server is not None and listener.is_reachable())
    assert directory.listeners == {listener.address: 0}
    assert 0 not in seen


async def test_false_announcements(start: Start, ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    server = start()
    directory = look(ends, server.address("workers.*"))
    liar = await speaker(ends, server)

    def is_heard() -> bool:
        liar.publish("tokenbus.workers.p0.here", "", b"0")
        return bool(directory.listeners)

    await until(is_heard)
    for subject, payload in (("-", b"0"), ("p0", b"-1"), ("p0", b"1" * 10), ("x" * 65, b"0"), ("gone", b"")):
        liar.publish(f"tokenbus.workers.{subject}.here", "", payload)
    for number in range(100):
        liar.publish(f"tokenbus.workers.p{number}.here", "", b"0")
    await until(lambda: "too many processors announce themselves" in caplog.text)
    assert len(directory.listeners) == 64
    assert set(directory.listeners) <= {server.address(f"workers.p{number}") for number in range(100)}


async def test_server_says_who_may_announce(start: Start, ends: Ends) -> None:
    users = (
        "{ user: p, password: p },"
        "{ user: w, password: w, permissions: {"
        "  publish: ['tokenbus.workers.who', 'tokenbus.workers.*.up.worker.w.*'],"
        "  subscribe: ['tokenbus.workers.*.here', 'tokenbus.workers.*.down.w.*'] } }"
    )
    server = start(f"authorization: {{ users: [{users}] }}\n")

    def settings(user: str) -> dict[str, str]:
        path = server.folder / user
        path.write_text(f"{user}:{user}")
        path.chmod(0o600)
        return {"nats_credentials": str(path), "nats_roles": "worker" if user == "w" else ""}

    worker, processor = (replace(QUICK, **settings(user)) for user in "wp")  # type: ignore[arg-type]
    directory = NatsTransport(worker).directory(server.address("workers.*"), lambda: None)
    ends.cleanup.push_async_callback(directory.close)
    with pytest.raises(AddressError, match="not permitted"):
        await ends.listen(server.address("workers.liar"), worker)
    liar = await soon(Servers(parse_nats(server.address("x")), worker).connect())
    ends.cleanup.push_async_callback(liar.close, 0)
    liar.publish("tokenbus.workers.liar.here", "", b"0")
    await until(lambda: "permissions violation" in liar.denied)
    listener = await ends.listen(server.address("workers.p0"), processor)
    await until(lambda: directory.listeners == {listener.address: 0})
    await introduce(await ends.connect(listener.address, worker), listener)
    await until(lambda: directory.listeners == {listener.address: 1})


async def test_group_is_no_listener(start: Start, ends: Ends) -> None:
    """A group's address stands for all of them: nothing listens or connects there, and a processor has its own."""
    address = start().address("workers.*")
    for method in (ends.listen, ends.connect):
        with pytest.raises(AddressError, match="it names no listener"):
            await method(address)
    own = address.removesuffix("*")
    assert member_address(address, "processor-0-1a2b") == own + "processor-0-1a2b"
    assert member_address(address, "ein prozeß.7-1a2b") == own + "ein-proze--7-1a2b"
    assert member_address(address, "-" + "x" * 70) == own + "x" * 64
    assert member_address("tcp://127.0.0.1:1", "processor") == "tcp://127.0.0.1:1"
