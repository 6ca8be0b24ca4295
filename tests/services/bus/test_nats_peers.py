"""Peers of a NATS listener that break its bounds, speak something else, or are another listener."""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from tests.services.bus.harness import introduce, meet_again
from tests.services.bus.nats_ends import QUICK, Ends, ends
from tests.support.nats import shared
from tests.support.waiting import soon, until
from tokenbus_services.bus import AddressError, Listener, nats_lanes, nats_listener
from tokenbus_services.bus.nats_conversation import HELLO, WELCOME, Frame, Kind

__all__ = ["ends"]
pytestmark = pytest.mark.process


class Attacker:
    """A client of the server that speaks whatever it likes."""

    def __init__(self, client: Client, name: str) -> None:
        self.client = client
        self.base = f"tokenbus.{name}"
        self.own = f"all.-.{secrets.token_hex(16)}"
        self.welcomes = asyncio.Event()

    async def hear(self) -> None:
        async def take(message: Msg) -> None:
            if message.data == WELCOME:
                self.welcomes.set()

        await self.client.subscribe(f"{self.base}.down.>", cb=take)

    async def open(self) -> None:
        await self.greet()
        await soon(self.welcomes.wait())

    async def greet(self) -> None:
        place, _, own = self.own.rpartition(".")
        await self.client.publish(f"{self.base}.up.{place}.hello", HELLO + own.encode())

    async def say(self, frame: Frame | bytes) -> None:
        await self.client.publish(f"{self.base}.up.{self.own}", frame if isinstance(frame, bytes) else frame.packed())
        await self.client.flush()


async def hear(message: Msg) -> None:
    """Say nothing."""


@pytest.fixture
async def attacker(name: str) -> AsyncIterator[Attacker]:
    client = Client()
    await client.connect(shared().server)
    made = Attacker(client, name)
    await made.hear()
    yield made
    await client.close()


@pytest.fixture
def name() -> str:
    return f"name-{secrets.token_hex(8)}"


async def test_message_that_never_ends(ends: Ends, attacker: Attacker, name: str) -> None:
    listener = await ends.listen(shared().address(name), replace(QUICK, max_unadmitted_bytes=600_000))
    await attacker.open()
    for number in range(1, 8):
        await attacker.say(Frame(Kind.MORE, number, 0, bytes(100_000)))
    await until(lambda: listener.usage().cut_off["bytes"] == 1)
    assert listener.usage().pending_bytes == 0
    assert "more than 600000" in ends.reasons[0]
    await introduce(await ends.connect(listener.address), listener)


async def test_peer_that_leaves_in_the_middle_of_a_message(ends: Ends, attacker: Attacker, name: str) -> None:
    listener = await ends.listen(shared().address(name))
    await attacker.open()
    await attacker.say(Frame(Kind.MORE, 1, 0, bytes(1000)))
    await until(lambda: listener.usage().pending_bytes == 1000)
    await attacker.say(Frame(Kind.END, 0, 0))
    await until(lambda: not listener.usage().unadmitted)
    assert listener.usage().pending_bytes == 0


async def test_too_many_small_messages(ends: Ends, attacker: Attacker, name: str) -> None:
    """A peer that sends more messages than the window has, although none was read, is cut off."""
    listener = await ends.listen(shared().address(name))
    await attacker.open()
    for number in range(1, 258):
        await attacker.say(Frame(Kind.LAST, number, 0, b"\x01" + bytes(7)))
    await until(lambda: listener.usage().cut_off["bytes"] == 1)
    assert "more than 256 messages" in ends.reasons[0]
    assert listener.usage().pending_bytes == 0


async def test_many_that_leave_at_once(ends: Ends, name: str) -> None:
    """What peers have sent that have left counts, too, as long as it is not read."""
    settings = replace(QUICK, max_unadmitted_bytes=600_000)
    listener = await ends.listen(shared().address(name), settings)
    for number in range(1, 5):
        connection = await ends.connect(listener.address)
        assert connection.send([bytes(250_000)])
        await soon(connection.close())
        await until(lambda number=number: listener.usage().cut_off["bytes"] or _held(listener) == number)  # type: ignore[misc]
    await until(lambda: listener.usage().cut_off["bytes"])
    assert listener.usage().pending_bytes <= 600_000


def _held(listener: Listener) -> int:
    return listener.usage().pending_bytes // 250_000


async def test_admitted_peers_together(ends: Ends, name: str) -> None:
    settings = replace(QUICK, max_pending_bytes=900_000, max_total_pending_bytes=900_000)
    listener = await ends.listen(shared().address(name), settings)
    connections = [await ends.connect(listener.address) for _ in range(2)]
    for connection in connections:
        await introduce(connection, listener)
    for size in (300_000, 200_000):
        assert connections[0].send([bytes(size)])
    assert connections[1].send([bytes(290_000)])
    await until(lambda: listener.usage().pending_bytes > 750_000)
    assert connections[1].send([bytes(200_000)])
    await until(lambda: listener.usage().cut_off["bytes"] == 1)
    assert listener.usage().pending_bytes == 490_000 + 2 * 8
    assert (await soon(listener.receive()))[1] == [bytes(290_000)]


async def test_silent_peers(ends: Ends, name: str) -> None:
    listener = await ends.listen(shared().address(name), replace(QUICK, introduction_timeout_ms=150))
    await introduce(await ends.connect(listener.address), listener)
    await ends.connect(listener.address)
    await until(lambda: listener.usage().cut_off["silent"])
    assert listener.usage().admitted == 1


@pytest.mark.parametrize("admitted", [1, 2])
async def test_most_peers(ends: Ends, name: str, admitted: int) -> None:
    """Above the bound on connections the oldest that have not introduced themselves are cut off, and no others."""
    listener = await ends.listen(shared().address(name), replace(QUICK, max_connections=2))
    for _ in range(admitted):
        await introduce(await ends.connect(listener.address), listener)
    for _ in range(3):
        await ends.connect(listener.address)
    await until(lambda: listener.usage().cut_off["connections"])
    assert listener.usage().unadmitted <= 2 - admitted
    assert listener.usage().admitted == admitted


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1",
        bytes(17),
        Frame(Kind.WELCOME, 0, 0),
        Frame(Kind.LAST, 1, 0, b""),
        Frame(Kind.LAST, 1, 0, b"\xff" * 8),
        Frame(Kind.LAST, 1, 0, b"\x01\0\0\0\xff\xff\xff\xff"),
        Frame(Kind.LAST, 1, 0, bytes(8)),
        Frame(Kind.LAST, 2**63, 0, b""),
        Frame(Kind.READ, 1, 2**63),
        Frame(Kind.OPEN, 0, 0, b"another protocol"),
        Frame(Kind.END, 0, 0),
    ],
)
async def test_other_frames(ends: Ends, attacker: Attacker, name: str, said: Frame | bytes) -> None:
    """Whatever a peer says, before and after it was welcomed, reaches no receive and ends nothing but itself."""
    listener = await ends.listen(shared().address(name))
    received = asyncio.ensure_future(listener.receive())
    await attacker.say(said)
    await attacker.open()
    await attacker.say(said)
    await attacker.client.flush()
    await attacker.client.flush()
    assert not received.done()
    received.cancel()
    await introduce(await ends.connect(listener.address), listener)


async def test_subjects_that_are_no_peers(ends: Ends, attacker: Attacker, name: str) -> None:
    listener = await ends.listen(shared().address(name))
    for own in (f"ALL.-.{'0' * 32}", f"all.a$b.{'0' * 32}", "all.-.0", f"all.{'a' * 65}.{'0' * 32}"):
        attacker.own = own
        await attacker.greet()
    await introduce(await ends.connect(listener.address), listener)
    assert listener.usage().unadmitted + listener.usage().admitted == 1


async def test_name_whose_listener_stands_still(ends: Ends, attacker: Attacker, name: str) -> None:
    await attacker.client.subscribe(f"{attacker.base}.listener", cb=hear)
    await attacker.client.flush()
    with pytest.raises(AddressError, match="taken: something listens there already"):
        await ends.listen(shared().address(name))


async def test_listener_that_was_there_first(ends: Ends, attacker: Attacker, name: str) -> None:
    listener = await ends.listen(shared().address(name))
    connection = await ends.connect(listener.address)
    old = await introduce(connection, listener)
    own = listener._id  # type: ignore[attr-defined]
    await attacker.client.publish(f"{attacker.base}.listener.{own}", b"mine")
    await until(lambda: ends.reasons)
    assert "another listener has this one's name" in ends.reasons[0]
    await until(listener.is_reachable)
    peer, _ = await meet_again(connection, listener)
    assert peer != old


async def test_two_that_start_at_once(ends: Ends, name: str) -> None:
    address = shared().address(name)
    made = await asyncio.gather(*(ends.listen(address) for _ in range(5)), return_exceptions=True)
    assert sum(not isinstance(each, AddressError) for each in made) == 1
    assert sum(isinstance(each, AddressError) for each in made) == 4


async def test_more_names_than_connections(ends: Ends, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_listener, "MOST_LANES", 2)
    monkeypatch.setattr(nats_lanes, "_MOST_NAMES", 2)
    listener = await ends.listen(shared().address(name))
    named = [replace(QUICK, nats_name=f"gpu-{number}") for number in range(6)]
    connections = [await ends.connect(listener.address, settings) for settings in named[:4]]
    peers = [await introduce(connection, listener) for connection in connections]
    assert [listener.identity(peer).name for peer in peers] == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]
    late = await ends.connect(listener.address, named[4])
    await until(lambda: listener.usage().dropped.get("gpu-4") or listener.usage().unadmitted)
    assert not listener.usage().unadmitted
    await connections[1].close()
    await until(lambda: listener.usage().admitted == 3)
    await introduce(late, listener)
    await introduce(await ends.connect(listener.address, named[0]), listener)


async def test_peers_of_one_name_leave_room_for_others(ends: Ends, attacker: Attacker, name: str) -> None:
    listener = await ends.listen(shared().address(name), replace(QUICK, max_connections=64))

    async def is_dropped() -> bool:
        """Say hello as another peer, which the server may drop, too; tell whether the listener has dropped one."""
        attacker.own = f"all.crowd.{secrets.token_hex(16)}"
        await attacker.greet()
        return "crowd" in listener.usage().dropped

    await until(is_dropped)
    assert listener.usage().unadmitted == 8
    await introduce(await ends.connect(listener.address, replace(QUICK, nats_name="honest")), listener)


async def test_peers_of_the_name_with_the_most_make_room(ends: Ends, attacker: Attacker, name: str) -> None:
    """Where all places are taken, the oldest peer of the name with the most is cut off, though others are older."""
    listener = await ends.listen(shared().address(name), replace(QUICK, max_connections=9))

    async def are_welcome(count: int) -> bool:
        """Say hello, which the server may drop; tell whether so many peers are there, or one was cut off."""
        await attacker.greet()
        return listener.usage().unadmitted == count or bool(ends.reasons)

    for place, who in enumerate(["honest", *["crowd"] * 8, "late"], 1):
        attacker.own = f"all.{who}.{secrets.token_hex(16)}"
        await until(partial(are_welcome, place))
    assert [reason.split(".")[1] for reason in ends.reasons] == ["crowd"]


async def test_name_that_broke_the_rules_waits(ends: Ends, attacker: Attacker, name: str) -> None:
    hour = replace(QUICK, reconnect_ms=3_600_000, reconnect_max_ms=3_600_000, heartbeat_timeout_ms=3_600_000)
    listener = await ends.listen(shared().address(name), hour)
    attacker.own = f"all.liar.{secrets.token_hex(16)}"
    await attacker.open()
    await attacker.say(b"no frame")
    await until(lambda: not listener.usage().unadmitted)
    dropped = listener.usage().dropped["liar"]
    attacker.own = f"all.liar.{secrets.token_hex(16)}"

    async def is_dropped_again() -> bool:
        """Say hello; tell whether the listener has dropped some more of them."""
        await attacker.greet()
        return listener.usage().dropped["liar"] >= dropped + 3

    await until(is_dropped_again)
    assert listener.usage().unadmitted == 0
    await introduce(await ends.connect(listener.address, replace(QUICK, nats_name="honest")), listener)


@pytest.mark.parametrize("kind", [Kind.READ, Kind.MORE])
async def test_frames_without_an_end_that_carry_nothing(ends: Ends, attacker: Attacker, name: str, kind: Kind) -> None:
    """A peer that sends frame after frame which no bound on bytes stops is cut off."""
    listener = await ends.listen(
        shared().address(name), replace(QUICK, heartbeat_interval_ms=30_000, heartbeat_timeout_ms=90_000)
    )
    await attacker.open()
    for number in range(1, 200):
        await attacker.client.publish(f"{attacker.base}.up.{attacker.own}", Frame(kind, number, 0).packed())
    await attacker.client.flush()
    await until(lambda: listener.usage().cut_off["bytes"])
    assert re.search("more than 64 frames that say nothing|0 bytes of a longer message", ends.reasons[0])
