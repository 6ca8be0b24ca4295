"""The hand-off between two workers: each request is taken once, or the first worker gets the reason why not."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.bus.keyed import Keyring
from tests.in_process.builders import EPOCH, generate_of, settings
from tests.support.waiting import MOST, turns, until
from tests.worker.peer import welcome_of
from tokenbus.backports import timeout
from tokenbus.bus import Identity, Role, ZeroMQTransport
from tokenbus.bus.handoff_tickets import new_ticket
from tokenbus.bus.memory import MemoryTransport
from tokenbus.bus.transport import ANONYMOUS
from tokenbus.settings import Settings
from tokenbus.testing import ManualClock
from tokenbus.worker import Publisher
from tokenbus.worker.handoff import (
    HandoffReceiver,
    HandoffSender,
    handoff_of,
    read_handoff,
    read_reply,
    reply_of,
)
from tokenbus.worker.publisher import WorkerCounts
from tokenbus_contracts import ContractError
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.handoff_pb2 import DecodeFrame, Handoff, HandoffReply
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_contracts.generated.stream_pb2 import ProcessorFrame, VoidTicket

ADDRESS = "memory://decode"
CHOSEN = {"worker.handoff_address": ADDRESS, "worker.max_requests": 4}
USED = "its ticket was used before, or is void: its request ended or went elsewhere"
UNTIL_MS = 9_000_000_000_000
"""The deadline of requests, in milliseconds since 1970: far away."""


def request(key: int, address: str = ADDRESS) -> Generate:
    return generate_of(key, handoff_address=address)


def ticketed(
    receiver: HandoffReceiver, key: int, worker_id: str = "worker-0", identity: Identity = ANONYMOUS
) -> Generate:
    point = receiver.point
    reached: dict[str, Any] = {"handoff_address": point.address, "handoff_server_key": point.server_key}
    generate = generate_of(key, deadline_unix_ms=UNTIL_MS, **reached)
    generate.handoff_ticket = new_ticket(point.key, generate, worker_id, identity)
    return generate


@dataclass
class Pair:
    """A prefill worker's sender and a decode worker's receiver, with the publisher that it hands requests to."""

    sender: HandoffSender
    receiver: HandoffReceiver
    publisher: Publisher
    transport: MemoryTransport
    settings: Settings
    clock: ManualClock
    failed: dict[int, str]

    def request(self, key: int) -> Generate:
        return ticketed(self.receiver, key, self.settings.worker.id)

    async def answered(self) -> None:
        async with timeout(MOST):
            while self.sender.pending:
                self.clock.advance(0.01)
                await asyncio.sleep(0)

    async def hand_off(self, generate: Generate, state: bytes = b"state", refusal: str = "") -> None:
        self.sender.send(generate, state)
        (await self.handed_in(1))[generate.request_key][1](refusal)
        await self.answered()

    async def handed_in(self, count: int) -> dict[int, tuple[bytes, Callable[[str], None]]]:
        found: dict[int, tuple[bytes, Callable[[str], None]]] = {}
        async with timeout(MOST):
            while len(found) < count:
                for taken in self.publisher.take_handoffs():
                    found[taken.generate.request_key] = (taken.state, taken.answer)
                await asyncio.sleep(0)
        return found


@asynccontextmanager
async def pair(**changed: object) -> AsyncIterator[Pair]:
    chosen = settings(CHOSEN | {name.replace("__", "."): value for name, value in changed.items()})
    transport = MemoryTransport(chosen.bus)
    failed: dict[int, str] = {}
    clock = ManualClock()
    async with (
        HandoffReceiver(chosen, transport, clock) as receiver,
        HandoffSender(chosen, transport, clock, WorkerCounts(), failed.__setitem__) as sender,
    ):
        publisher = Publisher(chosen, epoch=EPOCH)
        receiver.serve(publisher)
        yield Pair(sender, receiver, publisher, transport, chosen, clock, failed)


async def test_request_and_state_arrive_and_the_answer_ends_it() -> None:
    async with pair() as both:
        both.sender.send(both.request(7), b"state")
        taken = await both.handed_in(1)
        state, answer = taken[7]
        assert state == b"state"
        assert both.publisher.session.requests == {7}
        assert both.sender.pending == 1
        answer("")
        await both.answered()
    assert (both.sender.counts.handed_off, both.receiver.counts.taken_over, both.failed) == (1, 1, {})


async def test_refusal_reaches_who_began_it() -> None:
    """What the engine says against a request ends it where it came from, with the decode worker's address."""
    async with pair() as both:
        await both.hand_off(both.request(7), refusal="state: 8 bytes, got 5")
    assert both.failed == {7: f"the decode worker at {ADDRESS} refused it: state: 8 bytes, got 5"}
    assert (both.sender.counts.untaken, both.receiver.counts.refused) == (1, 1)


@pytest.mark.parametrize(
    ("has", "reason"),
    [(range(100, 104), "it has 4 requests, as many as it takes"), ([7], "it has an open request of that key")],
)
async def test_worker_with_other_requests_refuses(has: Iterable[int], reason: str) -> None:
    """A worker that is full, or has a request of the same key, takes no other one."""
    async with pair() as both:
        both.publisher.session.requests.update(has)
        both.sender.send(both.request(7), b"state")
        await both.answered()
        assert both.publisher.take_handoffs() == []
    assert both.failed == {7: f"the decode worker at {ADDRESS} refused it: {reason}"}


async def test_states_that_wait_are_bounded() -> None:
    """States beyond so many bytes that wait for the engine are refused, until it has taken some; one alone is not."""
    async with pair(worker__handoff_bytes=10) as both:
        for key in (7, 8, 9):
            both.sender.send(both.request(key), b"state")
        taken = await both.handed_in(2)
        assert both.publisher.counts.waiting_state_bytes == 10
        for _, answer in taken.values():
            answer("")
        await both.answered()
        assert both.publisher.counts.waiting_state_bytes == 0
        await both.hand_off(both.request(6), b"one that is larger alone")
    reason = "state: at most 10 bytes of states that wait, got 15"
    assert both.failed == {9: f"the decode worker at {ADDRESS} refused it: {reason}"}


@pytest.mark.parametrize("refusal", ["", "state: 8 bytes, got 5"])
async def test_ticket_is_taken_once(refusal: str) -> None:
    """A ticket that one hand-off has used serves no other, whatever became of the first, and however long ago."""
    async with pair() as both:
        connection = await both.transport.connect(ADDRESS)
        wanted = both.request(7)
        connection.send(handoff_of(wanted, b"state", 5, both.settings))
        _, answer = (await both.handed_in(1))[7]
        answer(refusal)
        both.publisher.forget(7)
        for key in range(100, 120):
            await both.hand_off(both.request(key))
            both.publisher.forget(key)
        for number in (6, 5):
            connection.send(handoff_of(wanted, b"state", number, both.settings))
        replies = [read_reply(await asyncio.wait_for(connection.receive(), MOST)) for _ in range(3)]
        assert [reply and reply.refusal for reply in replies] == [refusal, USED, refusal]
        assert both.publisher.take_handoffs() == []
        await connection.close()


async def test_void_ticket_is_refused() -> None:
    """A processor's word that a ticket is void reaches the listener from the publisher's thread, and counts there."""
    async with pair() as both:
        wanted = both.request(7)
        frame = ProcessorFrame(void_ticket=VoidTicket(ticket=wanted.handoff_ticket))
        for each in (ProcessorFrame(welcome=welcome_of()), frame):
            await asyncio.to_thread(both.publisher.session.receive, [write_frame(each)], 0.0)
        both.sender.send(wanted, b"state")
        await both.answered()
        assert both.publisher.take_handoffs() == []
    assert both.failed == {7: f"the decode worker at {ADDRESS} refused it: {USED}"}


async def test_nobody_answers() -> None:
    """A decode worker that is not there is tried again and again for its time, and then the request ends."""
    async with pair(worker__handoff_timeout_ms=500) as both:
        listener = await both.transport.listen("memory://deaf")
        both.sender.send(request(7, "memory://deaf"), b"state")
        for _ in range(4):
            await asyncio.wait_for(listener.receive(), MOST)
            both.clock.advance(0.125)
        await until(lambda: both.sender.pending == 0)
        await listener.close()
    assert both.failed == {7: "the decode worker at memory://deaf did not answer for 500 ms"}


@pytest.mark.parametrize(
    ("generate", "state", "line"),
    [
        (request(7, ""), b"s", "no decode worker is available"),
        (request(7), b"s" * 2001, r"its state: at most 2000 bytes, got 2001"),
        (request(7), b"", "state_bytes: at least 1, got 0"),
    ],
)
async def test_what_cannot_be_handed_off_is_refused_at_once(generate: Generate, state: bytes, line: str) -> None:
    """A request without an address, without a state or with one that is too large is not even tried."""
    chosen = {"bus__max_part_bytes": 2000, "limits__max_message_bytes": 2000}
    async with pair(**chosen) as both:
        with pytest.raises(ValueError, match=line):
            both.sender.send(generate, state)
        assert both.sender.pending == 0


async def test_hand_offs_that_wait_are_bounded() -> None:
    async with pair(worker__handoff_timeout_ms=400) as both:
        for key in range(1, 5):
            both.sender.send(request(key, "memory://nobody"), b"state")
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="at most 4 hand-offs"):
            both.sender.send(request(5), b"state")
        await both.answered()


async def test_connections_are_bounded() -> None:
    async with pair(worker__handoff_connections=2) as both:
        listeners = [await both.transport.listen(f"memory://d{number}") for number in range(3)]
        for number, listener in enumerate(listeners):
            both.sender.send(request(10 + number, f"memory://d{number}"), b"state")
            peer, parts = await asyncio.wait_for(listener.receive(), MOST)
            handoff = read_handoff(parts)
            assert handoff is not None
            listener.send(peer, reply_of(handoff, ""))
            await both.answered()
        assert list(both.sender._connections) == [("memory://d1", b""), ("memory://d2", b"")]
        for listener in listeners:
            await listener.close()


async def test_refused_large_hand_offs_cost_little() -> None:
    async with pair() as both:
        await both.hand_off(both.request(7))
        for _ in range(2):
            forger = await both.transport.connect(ADDRESS)
            for key in (8, 9):
                forger.send(handoff_of(request(key), bytes(1_000_000), key, both.settings))  # without a ticket
            await until(lambda: both.receiver.counts.refused == 1)
            await turns()
            await forger.close()
        await both.hand_off(both.request(10), bytes(100_000))
        assert (both.receiver.counts.taken_over, both.receiver.counts.refused) == (2, 1)


async def test_nonsense_ends_nothing() -> None:
    """Whatever else comes to either end is counted and dropped, and the next hand-off goes through."""
    async with pair() as both:
        connection = await both.transport.connect(ADDRESS)
        whole = handoff_of(both.request(8), b"state", 6, both.settings)
        newer = b"\xfa\x3f\x00"  # a field that only a newer minor knows
        for parts in ([b"x"], [b"x", b"y"], whole[:1], [whole[0], b"stale"], [whole[0], b"stat"], [newer, b""]):
            connection.send(parts)
        connection.send(handoff_of(request(8), b"state", 7, both.settings))  # without a ticket
        await both.hand_off(both.request(7))
        assert both.receiver.counts.refused == 6
        await connection.close()


def test_replies() -> None:
    """A refusal of any length fits its frame; a frame of a newer minor is no reply."""
    (frame,) = reply_of(Handoff(generate=request(7), number=5), "\u00e9" * 2000)
    reply = read_reply([frame])
    assert reply is not None
    assert reply.refusal == "\u00e9" * 500
    assert read_reply([b"\xfa\x3f\x00"]) is None
    with pytest.raises(ContractError, match="one part"):
        read_reply([frame, b""])
    with pytest.raises(ContractError, match=r"reply.request_key"):
        write_frame(DecodeFrame(reply=HandoffReply()))


class Keyed:
    """A decode worker that listens at a port with a key, and prefill workers that have keys or none."""

    def __init__(self, folder: Path) -> None:
        """Make keys; the prefill worker's may hand off, the observer's may not."""
        self.keyring = Keyring(folder)
        for name in ("prefill", "observer", "other"):
            self.keyring.make(name)
        self.keyring.allow(
            self.keyring.entry("prefill", Role.HANDOFF, names=("prefill-*",)),
            self.keyring.entry("observer", Role.OBSERVER, Role.WORKER, Role.CLIENT),
        )

    async def handed_off(
        self,
        name: str,
        *,
        worker_id: str = "prefill-0",
        keys: bool = True,
        given_to: tuple[str, str] = ("prefill-0", "prefill"),
    ) -> str:
        """Hand a request off over a real socket; return why it was not taken, empty if it was.

        Its ticket was given to the prefill worker of an id, which proved the key of a name.
        """
        chosen = settings(CHOSEN | {"worker.handoff_address": "tcp://127.0.0.1:0", "worker.id": worker_id})
        listening = replace(chosen, bus=self.keyring.listening(chosen.bus))
        sending = replace(chosen, bus=self.keyring.connecting(name, settings=chosen.bus) if name else chosen.bus)
        failed: dict[int, str] = {}
        clock = ManualClock()
        async with (
            HandoffReceiver(listening, ZeroMQTransport(listening.bus)) as receiver,
            HandoffSender(sending, ZeroMQTransport(sending.bus), clock, WorkerCounts(), failed.__setitem__) as sender,
        ):
            publisher = Publisher(listening, epoch=EPOCH)
            receiver.serve(publisher)
            both = Pair(sender, receiver, publisher, MemoryTransport(chosen.bus), chosen, clock, failed)
            given = Identity("prefill", frozenset(Role), key=self.keyring.public(given_to[1]))
            wanted = ticketed(receiver, 7, given_to[0], given)
            if not keys:
                wanted.handoff_server_key = b""
            sender.send(wanted, b"state")
            async with timeout(MOST):
                while sender.pending and not (self.refused(receiver) or failed):
                    for taken in publisher.take_handoffs():
                        taken.answer("")
                    await asyncio.sleep(0)
            await both.answered()
        return self.refused(receiver) or failed.get(7, "")

    def refused(self, receiver: HandoffReceiver) -> str:
        return "refused" if receiver.counts.refused_connections + receiver.counts.refused else ""


async def test_hand_off_with_key_and_ticket_is_taken(tmp_path: Path) -> None:
    assert await Keyed(tmp_path).handed_off("prefill") == ""


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("prefill", {"given_to": ("prefill-1", "prefill")}, "refused"),
        ("prefill", {"given_to": ("prefill-0", "other")}, "refused"),
        ("observer", {"given_to": ("prefill-0", "observer")}, "refused"),
        ("prefill", {"worker_id": "worker-0", "given_to": ("worker-0", "prefill")}, "refused"),
        ("observer", {}, "refused"),
        ("", {}, "its listener asks for keys: set bus.key_file"),
        ("other", {}, "refused"),
        ("prefill", {"keys": False}, "refused"),
        ("", {"keys": False}, "refused"),
    ],
    ids=[
        "another's ticket",
        "another key's ticket",
        "no role with a ticket",
        "another's name",
        "no role",
        "no key",
        "not allowed",
        "no CURVE",
        "NULL",
    ],
)
async def test_hand_off_without_a_right_is_not_taken(
    tmp_path: Path, name: str, given: dict[str, Any], reason: str
) -> None:
    keyed = Keyed(tmp_path)
    assert reason in await keyed.handed_off(name, **given)
