"""Line: what is dropped, repeated, cut and held, at a bare connection."""

import asyncio

import pytest

from tests.in_process.builders import settings
from tests.support.waiting import soon, turns
from tokenbus.bus import Connection, Listener
from tokenbus.bus.memory import MemoryTransport
from tokenbus.testing import Line

ADDRESS = "memory://line"


async def connected(**bus: object) -> tuple[Line, Connection, Listener]:
    transport = MemoryTransport(settings({f"bus.{name}": value for name, value in bus.items()}).bus)
    listener, line = await transport.listen(ADDRESS), Line(transport)
    return line, await line.connect(ADDRESS), listener


async def arrived(listener: Listener) -> list[bytes]:
    found: list[bytes] = []
    while True:
        receiving = asyncio.create_task(listener.receive())
        await turns()
        if not receiving.done():
            receiving.cancel()
            return found
        found += receiving.result()[1]


async def peer_of(connection: Connection, listener: Listener) -> bytes:
    connection.send([b"hello"])
    return (await soon(listener.receive()))[0]


async def test_what_is_dropped_does_not_arrive_and_breaks_the_connection() -> None:
    line, connection, listener = await connected()
    before = await peer_of(connection, listener)
    line.drop(sent=2)
    for number in range(2):
        connection.send([b"%d" % number])
    assert await arrived(listener) == []
    after = await peer_of(connection, listener)
    line.drop(received=1)
    listener.send(after, [b"dropped"])
    receiving = asyncio.create_task(connection.receive())
    await turns()
    last = await peer_of(connection, listener)
    listener.send(last, [b"kept"])
    assert await soon(receiving) == [b"kept"]
    assert len({before, after, last}) == 3


@pytest.mark.parametrize("counts", [{"sent": -1}, {"received": -1}])
async def test_counts_are_none_or_more(counts: dict[str, int]) -> None:
    line, _, _ = await connected()
    for call in (line.drop, line.repeat):
        with pytest.raises(ValueError, match="at least 0, got -1"):
            call(**counts)


async def test_what_is_repeated_arrives_twice() -> None:
    line, connection, listener = await connected()
    peer = await peer_of(connection, listener)
    line.repeat(sent=1, received=1)
    for number in range(2):
        connection.send([b"%d" % number])
        listener.send(peer, [b"%d" % number])
    assert await arrived(listener) == [b"0", b"0", b"1"]
    assert [await soon(connection.receive()) for _ in range(3)] == [[b"0"], [b"0"], [b"1"]]


async def test_what_is_held_arrives_later_in_order() -> None:
    line, connection, listener = await connected()
    peer = await peer_of(connection, listener)
    line.hold()
    for number in range(3):
        connection.send([b"%d" % number])
    listener.send(peer, [b"down"])
    receiving = asyncio.create_task(connection.receive())
    assert await arrived(listener) == []
    assert not receiving.done()
    line.release()
    connection.send([b"3"])
    assert await arrived(listener) == [b"0", b"1", b"2", b"3"]
    assert await soon(receiving) == [b"down"]


async def test_what_is_held_is_bounded_and_not_lost() -> None:
    line, connection, listener = await connected(high_water_mark=4)
    line.hold()
    assert [connection.send([b"%d" % number]) for number in range(5)] == [True] * 4 + [False]
    line.repeat(sent=4)
    line.release()
    found = await arrived(listener)
    while not connection.send([b"last"]) or b"last" not in found:
        found += await arrived(listener)
        if b"last" in found:
            break
    assert found[:8] == [b"0", b"0", b"1", b"1", b"2", b"2", b"3", b"3"]


async def test_cut_loses_what_is_on_its_way_and_makes_another_peer() -> None:
    line, connection, listener = await connected()
    before = await peer_of(connection, listener)
    connection.send([b"on its way"])
    line.hold()
    connection.send([b"held"])
    line.cut()
    line.release()
    assert await arrived(listener) == []
    assert await peer_of(connection, listener) != before
