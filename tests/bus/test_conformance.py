"""What every transport must hold; a new one joins by its name in `KINDS`."""

import asyncio
import pickle
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bus.harness import MAX_PART_BYTES, SETTINGS, Bus, both_ways, introduce, meet_again
from tests.support.waiting import soon, until
from tokenbus.backports import timeout
from tokenbus.bus import AddressError, ClosedError, Connection, Listener, MessageError, Outcome

KINDS = ["memory", "zeromq-ipc", "zeromq-tcp"]
SMALL = replace(SETTINGS, high_water_mark=8)
BULK = 65_536  # bytes; large enough that the kernel's buffers fill after some messages


@pytest.fixture(params=KINDS)
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    made = Bus(request.param, tmp_path)
    yield made
    await made.close()
    assert not errors


def numbered(number: int, size: int = 0) -> list[bytes]:
    return [b"%d" % number, bytes(size)]


def fill(connection: Connection) -> int:
    """Send until no more fits, and return how many messages did.

    It may have room again at once, even if the peer reads nothing: the kernel's buffers drain into each other.
    """
    sent = 0
    while connection.send(numbered(sent, BULK)):
        sent += 1
        assert sent < 10_000
    return sent


async def test_parts_stay_together(bus: Bus) -> None:
    listener = await bus.listen()
    names = [b"a", b"b", b"c"]
    for name in names:
        connection = await bus.connect(listener.address)
        for count in range(1, 40):
            assert connection.send([name] * count)
    seen: dict[bytes, list[list[bytes]]] = {}
    for _ in range(39 * len(names)):
        peer, parts = await soon(listener.receive())
        seen.setdefault(peer, []).append(parts)
    assert sorted(seen.values()) == [[[name] * count for count in range(1, 40)] for name in names]


LARGEST = [bytes([number]) * MAX_PART_BYTES for number in range(3)]


@pytest.mark.parametrize("parts", [[b""], [b"", b"x", b""], [b"x", b""], LARGEST], ids=["0", "0 x 0", "x 0", "largest"])
async def test_empty_and_largest_parts(bus: Bus, parts: list[bytes]) -> None:
    listener, connection, peer = await bus.pair()
    await both_ways(listener, connection, peer, parts)


@pytest.mark.parametrize("parts", [[], [bytes(MAX_PART_BYTES + 1)], [b"first", bytes(MAX_PART_BYTES + 1)]])
async def test_what_no_peer_would_take(bus: Bus, parts: list[bytes]) -> None:
    """A message without parts or with too large a part is an error of the sender's; nothing of it is sent."""
    listener, connection, peer = await bus.pair()
    with pytest.raises(MessageError):
        connection.send(parts)
    with pytest.raises(MessageError):
        listener.send(peer, parts)
    await both_ways(listener, connection, peer, [b"next"])


async def test_peer_that_does_not_read(bus: Bus) -> None:
    small = bus.with_settings(SMALL)
    listener, lazy, lazy_peer = await small.pair()
    other = await small.connect(listener.address)
    other_peer = await introduce(other, listener)
    sent = 0
    while (outcome := listener.send(lazy_peer, numbered(sent, BULK))) is Outcome.SENT:
        sent += 1
        assert sent < 10_000
    assert outcome is Outcome.FULL
    assert listener.send(other_peer, [b"still here"]) is Outcome.SENT
    assert await soon(other.receive()) == [b"still here"]
    for number in range(sent):
        assert await soon(lazy.receive()) == numbered(number, BULK)
    await until(lambda: listener.send(lazy_peer, [b"room again"]) is Outcome.SENT)
    assert await soon(lazy.receive()) == [b"room again"]


async def test_nobody_listens(bus: Bus) -> None:
    """A connection that has no listener takes as many messages as the high-water mark, and then no more."""
    small = bus.with_settings(SMALL)
    address = small.address()
    connection = await small.connect(address)
    assert fill(connection) == SMALL.high_water_mark
    listener = await small.listen(address)
    for number in range(SMALL.high_water_mark):
        assert (await soon(listener.receive()))[1] == numbered(number, BULK)


async def test_gone(bus: Bus) -> None:
    listener, connection, peer = await bus.pair()
    left = await bus.connect(listener.address)
    left_peer = await introduce(left, listener)
    await left.close()
    assert listener.send(b"nobody", [b"x"]) is Outcome.GONE
    await until(lambda: listener.send(left_peer, [b"x"]) is Outcome.GONE)
    await until(lambda: not listener.is_connected(left_peer))
    assert listener.send(peer, [b"y"]) is Outcome.SENT
    assert await soon(connection.receive()) == [b"y"]


async def test_listener_that_comes_back(bus: Bus) -> None:
    """A connection finds a new listener at the address, and is a new peer there; no message comes twice or mixed up."""
    first, connection, old = await bus.pair()
    sent = 0
    for _ in range(10):
        assert connection.send(numbered(sent))
        sent += 1
    seen = [int((await soon(first.receive()))[1][0]) for _ in range(5)]
    await soon(first.close())
    for _ in range(10):
        assert connection.send(numbered(sent))
        sent += 1
    second = await bus.listen(first.address)
    peer, late = await meet_again(connection, second)
    seen += [int(parts[0]) for parts in late]
    assert all(parts == numbered(int(parts[0])) for parts in late)
    assert seen == sorted(set(seen))
    assert peer != old
    assert second.send(old, [b"x"]) is Outcome.GONE
    assert second.send(peer, [b"welcome"]) is Outcome.SENT
    assert await soon(connection.receive()) == [b"welcome"]


async def test_connection_that_breaks(bus: Bus) -> None:
    """Who connected hears once of each break: of a listener that goes, of being cut off, and of no close of its own."""
    address = bus.address()
    breaks: list[int] = []
    connection = await bus.connect(address, lost=lambda: breaks.append(len(breaks)))
    first = await bus.listen(address)
    await introduce(connection, first)
    assert not breaks
    await soon(first.close())
    await until(lambda: len(breaks) == 1)
    second = await bus.listen(address)
    peer, _ = await meet_again(connection, second)
    assert len(breaks) == 1
    second.disconnect(peer)
    await until(lambda: len(breaks) == 2)
    again, _ = await meet_again(connection, second)
    await soon(connection.close())
    await until(lambda: second.send(again, [b"x"]) is Outcome.GONE)
    assert len(breaks) == 2


async def test_close(bus: Bus) -> None:
    listener, connection, peer = await bus.pair()
    waiting = [bus.spawn(connection.receive()), bus.spawn(listener.receive())]
    await asyncio.sleep(0)  # so that they wait
    for side in (connection, listener):
        await asyncio.gather(soon(side.close()), soon(side.close()))
        await soon(side.close())
    for task in waiting:
        with pytest.raises(ClosedError, match="closed on this side"):
            await soon(task)
    with pytest.raises(ClosedError, match=f"connection to {listener.address}"):
        connection.send([b"x"])
    with pytest.raises(ClosedError, match=f"listener at {listener.address}"):
        listener.send(peer, [b"x"])
    for side in (connection, listener):
        with pytest.raises(ClosedError):
            await soon(side.receive())


async def test_peer_that_leaves_ends_no_receive(bus: Bus) -> None:
    listener, connection, _ = await bus.pair()
    address = listener.address
    waiting = bus.spawn(connection.receive())
    await soon(listener.close())
    listener = await bus.listen(address)
    peer, _ = await meet_again(connection, listener)
    assert listener.send(peer, [b"x"]) is Outcome.SENT
    assert await soon(waiting) == [b"x"]
    receiving = bus.spawn(listener.receive())
    await soon(connection.close())
    other = await bus.connect(address)
    assert other.send([b"y"])
    assert (await soon(receiving))[1] == [b"y"]


async def test_what_was_sent_before_a_close(bus: Bus) -> None:
    """A goodbye arrives although its sender closes at once, whichever side it is."""
    listener, connection, peer = await bus.pair()
    leaving = await bus.transport.connect(listener.address)  # and no turn of the event loop until it closes
    assert leaving.send([b"goodbye"])
    await leaving.close()
    assert (await soon(listener.receive()))[1] == [b"goodbye"]
    assert listener.send(peer, [b"goodbye", bytes(BULK)]) is Outcome.SENT
    await soon(listener.close())
    assert await soon(connection.receive()) == [b"goodbye", bytes(BULK)]


async def test_quiet_peer_beside_a_busy_one(bus: Bus) -> None:
    small = bus.with_settings(SMALL)
    listener, busy, busy_peer = await small.pair()
    quiet = await small.connect(listener.address)

    async def shout() -> None:
        while True:
            while busy.send([b"again"]):
                pass
            await asyncio.sleep(0)

    small.spawn(shout())
    assert (await soon(listener.receive()))[0] == busy_peer
    assert quiet.send([b"psst"])
    for _ in range(100_000):
        peer, parts = await soon(listener.receive())
        if peer != busy_peer:
            break
    assert parts == [b"psst"]


def counted_turns(bus: Bus) -> Callable[[], int]:
    """Return what tells how often another coroutine has run since now."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    bus.spawn(count())
    return lambda: turns


async def test_receiver_hears_before_others_run(bus: Bus) -> None:
    """What a receiver puts off while more has come is done before others run, and before it waits."""
    listener, connection, _ = await bus.pair()
    put_off, seen, is_done = 0, list[int](), asyncio.Event()

    def catch_up() -> None:
        nonlocal put_off
        put_off = 0
        is_done.set()

    async def look() -> None:
        while True:
            seen.append(put_off)
            await asyncio.sleep(0)

    listener.budget.before_pause = catch_up
    for number in range(500):
        assert connection.send(numbered(number))
    bus.spawn(look())
    for _ in range(500):
        await listener.receive()
        put_off += 1
    assert set(seen) == {0}
    assert len(seen) >= 5
    is_done.clear()
    bus.spawn(listener.receive())
    await soon(is_done.wait())


@pytest.mark.parametrize("bus", KINDS[1:], indirect=True)  # the first counts messages alone: tests run alike
async def test_receiving_what_takes_long_lets_others_run(bus: Bus) -> None:
    listener, connection, _ = await bus.pair()
    for number in range(11):
        assert connection.send(numbered(number))
    await listener.receive()
    turns = counted_turns(bus)
    for _ in range(10):
        before = turns()
        time.sleep(0.003)  # noqa: ASYNC251 - as a receiver does that has much to do
        await listener.receive()
        assert turns() > before


async def test_cancelled_receive(bus: Bus) -> None:
    listener, connection, peer = await bus.pair()
    for number in range(20):
        receiving = [asyncio.create_task(connection.receive()), asyncio.create_task(listener.receive())]
        await asyncio.sleep(0)
        for task in receiving:
            task.cancel()
        assert connection.send(numbered(number))
        assert listener.send(peer, numbered(number)) is Outcome.SENT
        await asyncio.gather(*receiving, return_exceptions=True)
        assert all(task.cancelled() for task in receiving)
        assert await soon(listener.receive()) == (peer, numbered(number))
        assert await soon(connection.receive()) == numbered(number)


async def test_peer_that_leaves_with_much_unread(bus: Bus) -> None:
    small = bus.with_settings(SMALL)
    listener, connection, peer = await small.pair()
    most = SMALL.high_water_mark if bus.kind == "memory" else 5 * SMALL.high_water_mark  # the kernel holds the rest
    for number in range(most):
        await until(lambda number=number: connection.send(numbered(number, 1000)))  # type: ignore[misc]
    await soon(connection.close())
    seen: list[tuple[bytes, list[bytes]]] = []

    async def drain() -> None:
        while True:
            seen.append(await listener.receive())

    small.spawn(drain())
    await until(lambda: len(seen) >= SMALL.high_water_mark)
    await until(lambda: listener.send(peer, [b"x"]) is Outcome.GONE)
    assert seen == [(peer, numbered(number, 1000)) for number in range(len(seen))]


async def test_taken_address(bus: Bus) -> None:
    """A listener keeps its address: another is refused by name, and the first hears its peers as before."""
    listener, connection, peer = await bus.pair()
    other = bus if bus.kind == "memory" else bus.with_settings(SMALL)
    with pytest.raises(AddressError, match="taken: something listens there already") as refused:
        await soon(other.transport.listen(listener.address))
    assert refused.value.address == listener.address
    assert str(refused.value).startswith(f"{listener.address}: ")
    assert connection.send([b"x"])
    assert await soon(listener.receive()) == (peer, [b"x"])
    late = await bus.connect(listener.address)
    await introduce(late, listener)


@pytest.mark.parametrize("address", ["", "nonsense", "://", "http://127.0.0.1:80", "inproc://x", "memory:", "x\n://y"])
async def test_bad_address(bus: Bus, address: str) -> None:
    for use in (bus.transport.listen, bus.transport.connect):
        with pytest.raises(AddressError) as refused:
            await soon(use(address))
        assert refused.value.address == address
        assert str(refused.value).isprintable()
        assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)  # noqa: S301


async def test_transport_after_all_was_closed(bus: Bus) -> None:
    for _ in range(3):
        listener, connection, _ = await bus.pair()
        await soon(connection.close())
        await soon(listener.close())


COUNTS = pytest.mark.parametrize("count", [2000, pytest.param(20_000, marks=[pytest.mark.long, pytest.mark.nightly])])
WINDOW = 3


class Side:
    """Sends in one task and receives in another; each message that comes lets one more go, and nothing else does."""

    def __init__(self, end: Listener | Connection, peer: bytes | None, count: int) -> None:
        self._end = end
        self._count = count
        self._peer = peer
        self._credit = asyncio.Semaphore(WINDOW)

    async def run(self) -> None:
        await asyncio.gather(self._send(), self._receive())

    async def _send(self) -> None:
        for number in range(self._count):
            await self._credit.acquire()
            if self._peer is None:
                assert self._end.send(numbered(number))  # type: ignore[arg-type,call-arg]
            else:
                assert self._end.send(self._peer, numbered(number)) is Outcome.SENT  # type: ignore[call-arg,arg-type]

    async def _receive(self) -> None:
        for number in range(self._count):
            got = await self._end.receive()
            assert got == (numbered(number) if self._peer is None else (self._peer, numbered(number)))
            self._credit.release()


@COUNTS
async def test_two_busy_sides(bus: Bus, count: int) -> None:
    """Two sides that send and receive in small windows never miss that something arrived."""
    listener, connection, peer = await bus.pair()
    async with timeout(120):
        await asyncio.gather(Side(listener, peer, count).run(), Side(connection, None, count).run())
