"""ZeroMQ: what peers may hold of a listener, before and after they have introduced themselves: attacks on a process."""

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bus.attackers import MIB, RawPeer, Victim, in_thread, send_without_end
from tests.bus.harness import SETTINGS, Bus, introduce, meet_again
from tests.support.waiting import MOST, soon, until
from tokenbus.backports import timeout
from tokenbus.bus import Connection, Outcome, ZeroMQTransport
from tokenbus.bus.zeromq import ZeroMQListener
from tokenbus.settings import BusSettings
from tokenbus.testing import ManualClock

Make = Callable[..., Bus]
MOST_GROWTH = 1024 * MIB  # where nothing bounds it, an attack reaches four times that, and a busy guard is late
LARGE_PARTS = BusSettings(reconnect_ms=1, reconnect_max_ms=20)


class Good:
    """A peer that has introduced itself, on the one connection that it ever had, and talks all the time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.talks = 0

    async def talk(self) -> None:
        message = [b"%d" % self.talks]
        assert self._connection.send(message)
        assert await soon(self._connection.receive()) == message
        self.talks += 1

    async def goes_on(self) -> None:
        before = self.talks
        await until(lambda: self.talks > before + 1)


@asynccontextmanager
async def good_peer(victim: Victim) -> AsyncIterator[Good]:
    """Connect, and talk until the end; every message must come back, in order."""
    connection = await ZeroMQTransport(SETTINGS).connect(victim.address)
    assert connection.send([b"hello"])
    assert await soon(connection.receive()) == [b"hello"]
    good = Good(connection)
    ended = asyncio.Event()

    async def go_on() -> None:
        while not ended.is_set():
            await good.talk()

    talking = asyncio.create_task(go_on())
    try:
        yield good
        ended.set()
        await soon(talking)
    finally:
        talking.cancel()
        await connection.close()


def _address(kind: str, folder: Path) -> str:
    return f"ipc://{folder}/victim" if kind == "ipc" else "tcp://127.0.0.1:0"


@pytest.mark.parametrize(
    ("kind", "attackers", "hello"),
    [
        ("tcp", 20, True),
        ("ipc", 1, False),
        pytest.param("tcp", 20, False, marks=pytest.mark.nightly),
        pytest.param("ipc", 1, True, marks=pytest.mark.nightly),
    ],
)
async def test_messages_that_never_end(tmp_path: Path, kind: str, hello: bool, attackers: int) -> None:  # noqa: FBT001
    """A peer that sends parts without end is cut off, and the listener's memory stays in bounds; good peers go on.

    Over ipc it keeps to half a gigabyte a second, so that its bytes are rarely seen before they are read.
    """
    pause = 0.002 if kind == "ipc" else 0
    async with Victim(LARGE_PARTS, _address(kind, tmp_path)) as victim, good_peer(victim) as good:
        sent = await asyncio.gather(
            *[in_thread(send_without_end, victim.address, hello=hello, pause=pause) for _ in range(attackers)]
        )
        assert max(sent) < 2**31
        assert victim.growth < MOST_GROWTH
        await victim.refused(r"cut off: .*bytes.* more than \d+$")
        await good.goes_on()


async def test_message_of_ever_more_tiny_parts() -> None:
    """What each part costs the listener is more than what it carries."""

    def send_without_end(address: str) -> None:
        with contextlib.suppress(ConnectionError), RawPeer(address) as peer:
            while True:
                peer.socket.sendall(b"\1\1x" * 4000)

    async with Victim(LARGE_PARTS) as victim, good_peer(victim) as good:
        await in_thread(send_without_end, victim.address)
        assert victim.growth < MOST_GROWTH
        await victim.refused("cut off: .*an unfinished message, for which this process grew by")
        await good.goes_on()


class TimedBus(Bus):
    """A transport whose guard goes by a clock that the test sets, beside a peer that has introduced itself."""

    def __init__(self, kind: str, folder: Path, settings: BusSettings) -> None:
        self.clock = LookedAtClock()
        self.reasons: list[str] = []
        super().__init__(f"zeromq-{kind}", folder, settings)

    def make(self, settings: BusSettings) -> ZeroMQTransport:
        return ZeroMQTransport(settings, self.clock.now)

    async def __aenter__(self) -> "TimedBus":
        self.listener = await self.listen(refused=self.reasons.append)
        self.good = await self.connect(self.listener.address)
        assert self.good.send([b"hello"])
        self.reading = self.spawn(self._read())
        assert await soon(self.good.receive()) == [b"hello"]
        return self

    async def _read(self) -> None:
        while True:
            peer, parts = await self.listener.receive()
            if parts == [b"hello"]:
                self.listener.admit(peer)
            self.listener.send(peer, parts)

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def guard_sees(self, condition: Callable[[], bool]) -> None:
        """Let time pass until the guard, which looks again and again, has seen something."""

        def looks() -> bool:
            self.clock.advance(0.3)
            return condition()

        await until(looks)

    async def good_goes_on(self) -> None:
        assert self.good.send([b"still here"])
        assert await soon(self.good.receive()) == [b"still here"]


class LookedAtClock(ManualClock):
    """A clock whose user can wait until another thread has looked at it, and so has acted on its time."""

    def __init__(self) -> None:
        super().__init__()
        self._looks = 0
        self._looked = threading.Condition()

    def now(self) -> float:
        with self._looked:
            self._looks += 1
            self._looked.notify_all()
            return super().now()

    def wait_for_looks(self, count: int) -> None:
        with self._looked:
            enough = self._looks + count
            assert self._looked.wait_for(lambda: self._looks >= enough, MOST)


async def test_flooder_that_is_read_is_cut_off_before_those_that_hold_little(tmp_path: Path) -> None:
    """What is held in sum is its fault that holds the most, however long the others have held their little."""
    bounds = replace(SETTINGS, max_part_bytes=4 * MIB, max_pending_bytes=64 * MIB, max_total_pending_bytes=MIB)
    async with TimedBus("tcp", tmp_path, bounds) as bus, AsyncExitStack() as stack:
        idle, flooder = [stack.enter_context(await in_thread(RawPeer, bus.listener.address)) for _ in range(2)]
        idle.part(b"hello")
        flooder.part(b"hello")
        await until(lambda: bus.listener.usage().admitted == 3)
        await in_thread(idle.part, bytes(MIB // 4), more=True)
        await bus.guard_sees(lambda: bus.listener.usage().pending_bytes > 0)
        bus.clock.advance(1e6)
        flooder.part(b"one more")
        await in_thread(flooder.part, bytes(2 * MIB), more=True)
        await bus.guard_sees(lambda: bool(bus.reasons))
        await bus.good_goes_on()
        (reason,) = bus.reasons
        held = re.search(r"it holds (\d+) of \d+ bytes .* together more than 1048576$", reason)
        assert held is not None
        assert int(held[1]) > MIB // 2


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
@pytest.mark.parametrize("trickles", [False, True])
async def test_connections_that_say_nothing(tmp_path: Path, kind: str, *, trickles: bool) -> None:
    """A peer that shook hands and says nothing, or ever more of one message, is cut off in time; no other one is."""
    async with TimedBus(kind, tmp_path, replace(LARGE_PARTS, introduction_timeout_ms=1000)) as bus:
        with await in_thread(RawPeer, bus.listener.address) as silent:
            for seconds in (0.9, 0.5):
                if trickles:
                    silent.part(b"x", more=True)
                bus.clock.advance(seconds)
            await in_thread(silent.wait_for_end)
        await until(lambda: bool(bus.reasons))
        await bus.good_goes_on()
        (reason,) = bus.reasons
        assert re.search("cut off: it has not introduced itself within 1000 ms", reason)


async def test_flood_of_silent_connections() -> None:
    settings = replace(SETTINGS, introduction_timeout_ms=60_000)
    async with Victim(settings, open_files=256) as victim, good_peer(victim) as good, AsyncExitStack() as stack:
        for _ in range(150):  # some more than have room
            with contextlib.suppress(ConnectionError):
                stack.enter_context(await in_thread(RawPeer, victim.address))
        async with good_peer(victim) as late:
            await late.goes_on()
        await good.goes_on()
        await victim.refused("cut off: at most .* connections at once, and this peer has not introduced itself")
        assert victim.open_files < 256
        assert not any("descriptor" in line for line in victim.refusals)


async def test_descriptors_that_run_out() -> None:
    """With no descriptor left a connection is refused, the process does not spin, and goes on when there are some."""
    async with Victim(SETTINGS, open_files=256) as victim, good_peer(victim) as good:
        victim.tell(b"open files")
        await victim.refused("^files are open$")
        with contextlib.suppress(ConnectionError):  # it may also be let in, by a descriptor that was freed just then
            (await in_thread(RawPeer, victim.address)).socket.close()
        await victim.refused("^a peer: no connection can be accepted: no descriptor is left$")
        await good.goes_on()
        victim.tell(b"close files")
        await victim.refused("^files are closed$")
        async with good_peer(victim) as late:
            await late.goes_on()


async def test_peer_that_chooses_its_id(tmp_path: Path) -> None:
    """A routing id of a peer's own choice is refused: it could be another's, or megabytes for each message."""
    async with TimedBus("tcp", tmp_path, SETTINGS) as bus:
        with await in_thread(RawPeer, bus.listener.address, b"x" * 1000) as peer:
            peer.part(b"hello")
            await in_thread(peer.wait_for_end)
        await until(lambda: bool(bus.reasons))
        assert bus.reasons[0].endswith("cut off: it chose an id for itself, of 1000 bytes")
        await bus.good_goes_on()


async def test_peer_that_sends_and_sends_and_does_not_introduce_itself_is_cut_off(make: Make) -> None:
    bus, reasons = make("zeromq-tcp"), list[str]()
    bus = bus.with_settings(replace(SETTINGS, max_unadmitted_bytes=MIB))
    listener = await bus.listen(refused=reasons.append)
    connection, received = await bus.connect(listener.address), 0
    while not reasons:
        connection.send([bytes(65_536)])
        with contextlib.suppress(TimeoutError):
            async with timeout(0.01):
                received += len((await listener.receive())[1][0])
    assert received <= MIB
    assert "has sent" in reasons[0]


@pytest.mark.parametrize("kind", ["zeromq-tcp", "zeromq-ipc"])
async def test_disconnect(make: Make, kind: str) -> None:
    bus = make(kind)
    listener, connection, peer = await bus.pair()
    assert connection.send([b"more"])
    assert listener.send(peer, [b"last word"]) is Outcome.SENT
    listener.disconnect(peer)
    assert await soon(connection.receive()) == [b"last word"]
    again, seen = await meet_again(connection, listener)
    assert again != peer
    assert [b"more"] not in seen
    await until(lambda: listener.send(peer, [b"gone"]) is Outcome.GONE)  # libzmq removes the old peer in its own time


class SeenTooEarly(dict[int, object]):
    """A listener's connections: the guard sees none, and the first is there before it has begun to sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.has_one = threading.Event(), threading.Event()

    def __bool__(self) -> bool:
        if self.has_one.is_set():
            return True
        self.seen.set()
        self.has_one.wait(MOST)
        return False

    def __setitem__(self, descriptor: int, connection: object) -> None:
        super().__setitem__(descriptor, connection)
        self.has_one.set()


async def test_guard_watches_what_is_accepted_while_it_falls_asleep(make: Make) -> None:
    bus = make("zeromq-tcp")
    listener = await bus.listen()
    assert isinstance(listener, ZeroMQListener)
    monitor = listener._monitor
    connections = SeenTooEarly()
    monitor.connections = connections  # type: ignore[assignment]
    monitor.guard.release(monitor)
    monitor.guard.watch(monitor)  # which wakes it
    await until(connections.seen.is_set)
    connection = await bus.connect(listener.address)
    peer = await introduce(connection, listener)
    listener.disconnect(peer)
    again, _ = await meet_again(connection, listener)
    assert again != peer


async def test_busy_listener_cuts_nobody_off_for_silence(tmp_path: Path) -> None:
    """What waits to be read is not silence: an introduction counts that a busy event loop has not read in time."""
    async with TimedBus("tcp", tmp_path, replace(SETTINGS, introduction_timeout_ms=200)) as bus:
        listener = bus.listener
        assert isinstance(listener, ZeroMQListener)
        bus.reading.cancel()
        connection = await bus.connect(listener.address)
        assert connection.send([b"hello"])
        await until(lambda: not listener._socket.is_read_out())
        bus.clock.advance(1)
        bus.clock.wait_for_looks(3)  # this thread is busy; the guard has looked, and wants to know if all was read
        await asyncio.sleep(0)  # it is answered
        peer, _ = await soon(listener.receive())
        listener.admit(peer)
        assert listener.send(peer, [b"welcome"]) is Outcome.SENT
        assert await soon(connection.receive()) == [b"welcome"]
        assert bus.reasons == []
