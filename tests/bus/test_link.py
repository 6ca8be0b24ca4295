"""Link: carries the frames that a session sends and receives, until it is stopped."""

import asyncio
import threading
from collections import deque
from typing import Any

import pytest

from tests.support.waiting import soon, turns
from tokenbus.bus import Listener, Outcome
from tokenbus.bus.link import Link, SessionState
from tokenbus.bus.memory import MemoryTransport
from tokenbus.settings import BusSettings
from tokenbus.testing import ManualClock
from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.stream_pb2 import GoodbyeReason, Refusal, RefusalReason

ADDRESS = "memory://link"


class Script:
    def __init__(self) -> None:
        self.state = SessionState.GREETING
        self.processor_id = "p"
        self.handshakes = 0
        self.refusal: Refusal | None = None
        self.loss = ""
        self.outstanding = 0
        self.leaves = False
        self.address_index = 0
        self.breaks: list[float] = []
        self.excused: list[float] = []
        self.to_say: deque[list[bytes]] = deque()
        self.heard: list[tuple[list[bytes], float]] = []
        self.wait = 3600.0

    def receive(self, parts: list[bytes], now: float) -> None:
        if parts == [b"wrong"]:
            raise ContractError("message", "right", "wrong")
        self.heard.append((parts, now))
        if parts == [b"done"]:
            self.outstanding = 0
        if parts[0] in STATES:
            self.state = STATES[parts[0]]

    def disconnected(self, now: float) -> None:
        self.breaks.append(now)
        self.to_say.append([b"again"])

    def excuse(self, seconds: float, _now: float) -> None:
        self.excused.append(seconds)

    def next_message(self, _now: float) -> list[bytes] | None:
        return self.to_say.popleft() if self.to_say else None

    def is_leaving(self, _now: float) -> bool:
        return self.leaves

    def move(self, _now: float) -> None:
        self.leaves, self.address_index = False, 1 - self.address_index

    def seconds_to_wait(self, _now: float) -> float:
        return self.wait

    def goodbye(self, reason: GoodbyeReason) -> list[bytes]:
        return [b"goodbye %d" % reason]


STATES = {b"open": SessionState.OPEN, b"refuse": SessionState.REFUSED, b"greet": SessionState.GREETING}


class Line:
    def __init__(self, high_water_mark: int = 4) -> None:
        self.script, self.clock, self.lock = Script(), ManualClock(), threading.RLock()
        session: Any = self.script
        self.link = Link(session, self.lock, self.clock, "worker")
        self.transport = MemoryTransport(BusSettings(high_water_mark=high_water_mark))
        self.listener: Listener
        self.task: asyncio.Task[None]
        self.peer = b""

    async def start(self) -> "Line":
        self.listener = await self.transport.listen(ADDRESS)
        self.task = await self.link.start(self.transport, [ADDRESS])
        await turns()
        return self

    async def said(self) -> list[bytes]:
        self.peer, parts = await soon(self.listener.receive())
        return parts

    def say(self, *parts: bytes) -> None:
        with self.lock:
            self.script.to_say.append(list(parts))
            self.link.wake()

    async def stop(self, seconds: float = 0.0) -> None:
        self.link.stop(seconds)
        await soon(self.task)


async def test_address_where_no_processor_answers_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """After 3 s, and every 30 s from then on, with the address, its setting and what to do."""
    line = Line()
    line.script.wait = 1.0
    await line.start()

    async def told_after(seconds: int) -> int:
        for _ in range(seconds):
            line.clock.advance(1.0)
            await turns()
        lines = [record.message for record in caplog.records if record.message.startswith("no processor answers")]
        assert all(f'address="{ADDRESS}" setting="bus.workers_address"' in each for each in lines)
        return len(lines)

    assert [await told_after(seconds) for seconds in (2, 2, 26, 6)] == [0, 1, 1, 2]
    line.script.state = SessionState.OPEN
    assert await told_after(60) == 2
    await line.stop()


async def test_messages_go_out_in_order_and_come_in() -> None:
    line = await Line().start()
    for word in (b"one", b"two"):
        line.say(word, b"part")
    assert [await line.said() for _ in range(2)] == [[b"one", b"part"], [b"two", b"part"]]
    line.clock.advance(5.0)
    line.listener.send(line.peer, [b"hello"])
    await turns()
    assert line.script.heard == [([b"hello"], 1005.0)]
    await line.stop()


async def test_link_goes_to_the_next_address_and_round_again() -> None:
    line = Line()
    line.listener = await line.transport.listen(ADDRESS)
    other = await line.transport.listen("memory://other")
    line.task = await line.link.start(line.transport, [ADDRESS, "memory://other"])
    for listener, following in ((line.listener, other), (other, line.listener)):
        line.say(b"before")
        left, _ = await soon(listener.receive())
        with line.lock:
            line.script.leaves = True
            line.link.wake()
        await turns()
        line.say(b"here")
        _, parts = await soon(following.receive())
        assert parts == [b"here"]
        assert listener.send(left, [b"late"]) is Outcome.GONE
    await line.stop()
    assert (await soon(line.listener.receive()))[1] == [b"goodbye 1"]


async def test_session_hears_that_its_connection_broke() -> None:
    """At the clock's time, and it is asked at once for what to say; what it has left since is no news."""
    line = Line()
    first = await line.transport.listen(ADDRESS)
    second = await line.transport.listen(f"{ADDRESS}-2")
    line.task = await line.link.start(line.transport, [ADDRESS, f"{ADDRESS}-2"])
    await turns()
    line.clock.advance(5.0)
    await first.close()
    assert line.script.breaks == [line.clock.now()]
    line.listener = await line.transport.listen(ADDRESS)
    assert await line.said() == [b"again"]
    line.script.leaves = True
    line.link.wake()
    await turns()
    await line.listener.close()
    assert len(line.script.breaks) == 1
    await second.close()
    assert len(line.script.breaks) == 2
    await line.stop()


async def test_session_that_fails_ends_the_link() -> None:
    line = await Line().start()

    def fail(_now: float) -> None:
        raise RuntimeError("nothing to say")

    line.script.next_message = fail  # type: ignore[method-assign]
    line.say(b"one")
    with pytest.raises(ExceptionGroup) as raised:
        await soon(line.task)
    assert raised.group_contains(RuntimeError, match="nothing to say")


async def test_session_that_is_not_woken_is_asked_in_time() -> None:
    line = Line()
    line.script.wait = 2.0
    await line.start()
    line.script.to_say.append([b"later"])
    line.clock.advance(1.99)
    await turns()
    assert line.script.to_say
    line.clock.advance(0.01)
    assert await line.said() == [b"later"]
    await line.stop()


async def test_what_arrives_has_the_session_asked_again() -> None:
    line = await Line().start()
    line.say(b"first")
    await line.said()
    await turns()
    line.script.to_say.append([b"answer"])
    line.listener.send(line.peer, [b"question"])
    assert await line.said() == [b"answer"]
    await line.stop()


async def test_full_connection_keeps_the_message() -> None:
    """A message that finds no room is kept and goes out later, once and in its place (case 20, 21)."""
    line = await Line(high_water_mark=2).start()
    words = [b"%d" % number for number in range(5)]
    for word in words:
        line.say(word)
    await turns()
    found = []
    for _ in words:
        found.append(await line.said())
        line.clock.advance(0.01)
    assert found == [[word] for word in words]
    await line.stop()


async def test_wrong_frame_is_counted_and_nothing_else() -> None:
    line = await Line().start()
    line.say(b"here")
    await line.said()
    for word in (b"wrong", b"right"):
        line.listener.send(line.peer, [word])
    await turns()
    assert line.link.refused_frames == 1
    assert [parts for parts, _ in line.script.heard] == [[b"right"]]
    await line.stop()


async def test_stopping_waits_for_answers() -> None:
    """A link that is stopped goes on until all was answered; time alone ends it only at the drain's end."""
    line = await Line().start()
    line.script.outstanding = 1
    line.say(b"last words")
    await line.said()
    line.link.stop(2.0)
    await turns()
    line.clock.advance(1.99)
    await turns()
    assert not line.task.done()
    line.listener.send(line.peer, [b"done"])
    await soon(line.task)


@pytest.mark.parametrize(("outstanding", "seconds", "logged"), [(0, 1, 0), (1, 1, 1), (1, 0, 0)])
async def test_what_was_not_answered_is_logged(
    caplog: pytest.LogCaptureFixture, outstanding: int, seconds: int, logged: int
) -> None:
    """What a drain has waited for in vain is logged; who is not to wait knows it."""
    line = await Line().start()
    line.script.outstanding = outstanding
    line.link.stop(seconds)
    await turns()
    line.clock.advance(seconds)
    await soon(line.task)
    assert caplog.text.count("drain timed out") == logged


async def test_states_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    line = await Line().start()
    line.script.refusal = Refusal(reason=RefusalReason.REFUSAL_REASON_LIMITS, message="too wide")
    line.say(b"here")
    await line.said()
    for word in (b"refuse", b"open", b"open", b"greet"):
        line.listener.send(line.peer, [word])
        await turns()
    line.script.loss = "it closes"
    line.say(b"hello")
    await turns()
    await line.stop()
    texts = [" ".join(record.getMessage().split(" ")[:2]) for record in caplog.records]
    assert texts == ["refused by", 'connected processor="p"', "processor asks", "processor lost"]
    assert "too wide" in caplog.text
    assert 'processor lost reason="it closes"' in caplog.text


async def test_time_in_which_this_process_had_no_turn_is_no_silence() -> None:
    line = Line()
    line.script.wait = 1.0
    await line.start()
    line.script.excused.clear()
    line.clock.advance(1.0)
    await turns()
    assert line.script.excused == []
    line.clock.advance(4.0)
    await turns()
    assert line.script.excused == [3.0]
    await line.stop()


async def test_waking_or_stopping_what_does_not_run_is_harmless() -> None:
    line = await Line().start()
    await line.stop()
    line.say(b"too late")
    line.link.stop(1.0)
    await turns()
    assert line.script.to_say
