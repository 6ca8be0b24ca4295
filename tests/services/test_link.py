"""Link: carries the frames that a session sends and receives, until it is stopped."""

import asyncio
import threading
from collections import deque
from typing import Any

import pytest

from tests.support.clock import ManualClock
from tests.support.waiting import soon, turns
from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.stream_pb2 import GoodbyeReason, Refusal, RefusalReason
from tokenbus_services.bus import Listener
from tokenbus_services.bus.memory import MemoryTransport
from tokenbus_services.link import Link, SessionState
from tokenbus_services.settings import BusSettings

ADDRESS = "memory://link"


class Script:
    """A session that says what the test puts there."""

    def __init__(self) -> None:
        """Begin with nothing to say."""
        self.state = SessionState.GREETING
        self.processor_id = "p"
        self.handshakes = 0
        self.refusal: Refusal | None = None
        self.outstanding = 0
        self.to_say: deque[list[bytes]] = deque()
        self.heard: list[tuple[list[bytes], float]] = []
        self.wait = 3600.0

    def receive(self, parts: list[bytes], now: float) -> None:
        """Keep what came; some words have a meaning."""
        if parts == [b"wrong"]:
            raise ContractError("message", "right", "wrong")
        self.heard.append((parts, now))
        if parts == [b"done"]:
            self.outstanding = 0
        if parts[0] in STATES:
            self.state = STATES[parts[0]]

    def next_message(self, now: float) -> list[bytes] | None:
        """Return the next thing to say."""
        del now
        return self.to_say.popleft() if self.to_say else None

    def seconds_to_wait(self, now: float) -> float:
        """Return what the test set."""
        del now
        return self.wait

    def goodbye(self, reason: GoodbyeReason, message: str = "") -> list[bytes]:
        """Leave."""
        del message
        return [b"goodbye %d" % reason]


STATES = {b"open": SessionState.OPEN, b"refuse": SessionState.REFUSED, b"greet": SessionState.GREETING}


class Line:
    """A link between a script and a listener."""

    def __init__(self, high_water_mark: int = 4) -> None:
        """Begin without running."""
        self.script, self.clock, self.lock = Script(), ManualClock(), threading.RLock()
        session: Any = self.script
        self.link = Link(session, self.lock, self.clock, "worker")
        self.transport = MemoryTransport(BusSettings(high_water_mark=high_water_mark))
        self.listener: Listener
        self.task: asyncio.Task[None]
        self.peer = b""

    async def start(self) -> "Line":
        """Run it."""
        self.listener = await self.transport.listen(ADDRESS)
        self.task = await self.link.start(self.transport, ADDRESS)
        await turns()
        return self

    async def said(self) -> list[bytes]:
        """Return the next message that arrives."""
        self.peer, parts = await soon(self.listener.receive())
        return parts

    def say(self, *parts: bytes) -> None:
        """Put something to say there, and wake the link."""
        with self.lock:
            self.script.to_say.append(list(parts))
            self.link.wake()

    async def stop(self, seconds: float = 0.0) -> None:
        """Stop it, and wait until it has ended."""
        self.link.stop(seconds)
        await soon(self.task)


async def test_messages_go_out_in_order_and_come_in() -> None:
    """What the session says arrives in order, and what comes is heard at the clock's time."""
    line = await Line().start()
    for word in (b"one", b"two"):
        line.say(word, b"part")
    assert [await line.said() for _ in range(2)] == [[b"one", b"part"], [b"two", b"part"]]
    line.clock.advance(5.0)
    line.listener.send(line.peer, [b"hello"])
    await turns()
    assert line.script.heard == [([b"hello"], 1005.0)]
    await line.stop()


async def test_session_that_is_not_woken_is_asked_in_time() -> None:
    """Without a call the session is asked again when it said that it would have something to say."""
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


async def test_any_thread_may_wake_it() -> None:
    """A message that another thread put there goes out at once."""
    line = await Line().start()
    await asyncio.to_thread(line.say, b"from a thread")
    assert await line.said() == [b"from a thread"]
    assert line.link.thread_id == threading.get_ident()
    await line.stop()


async def test_what_arrives_has_the_session_asked_again() -> None:
    """What came may be the answer to something, so the session is asked whether it has more to say."""
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
    """A message that the session refuses ends nothing; the next one is heard."""
    line = await Line().start()
    line.say(b"here")
    await line.said()
    for word in (b"wrong", b"right"):
        line.listener.send(line.peer, [word])
    await turns()
    assert line.link.refused_frames == 1
    assert [parts for parts, _ in line.script.heard] == [[b"right"]]
    await line.stop()


async def test_stopping_says_goodbye() -> None:
    """With nothing left to wait for, a link that is stopped says goodbye and ends, without an error (case 21)."""
    line = await Line().start()
    await line.stop(60.0)
    assert await line.said() == [b"goodbye %d" % GoodbyeReason.GOODBYE_REASON_STOPPED]


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


@pytest.mark.parametrize("outstanding", [0, 1])
async def test_what_was_not_answered_is_logged(caplog: pytest.LogCaptureFixture, outstanding: int) -> None:
    """Leaving before all was answered is an error in the log, and leaving with nothing open is none."""
    line = await Line().start()
    line.script.outstanding = outstanding
    await line.stop()
    assert ("drain timed out" in caplog.text) is bool(outstanding)


async def test_drain_ends_on_time() -> None:
    """What is never answered does not keep a link beyond the drain's time."""
    line = await Line().start()
    line.script.outstanding = 1
    line.link.stop(2.0)
    await turns()
    line.clock.advance(1.99)
    await turns()
    assert not line.task.done()
    line.clock.advance(0.01)
    await soon(line.task)


async def test_states_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """That a processor refused, or was connected, or asks for a new handshake, can be read in the log."""
    caplog.set_level("INFO")
    line = await Line().start()
    line.script.refusal = Refusal(reason=RefusalReason.REFUSAL_REASON_LIMITS, message="too wide")
    line.say(b"here")
    await line.said()
    for word in (b"refuse", b"open", b"open", b"greet"):
        line.listener.send(line.peer, [word])
        await turns()
    await line.stop()
    texts = [record.getMessage().split(" ")[0] for record in caplog.records]
    assert texts == ["refused", "connected", "processor"]
    assert "too wide" in caplog.text


async def test_waking_or_stopping_what_does_not_run_is_harmless() -> None:
    """A link that has ended can be woken and stopped; nothing happens."""
    line = await Line().start()
    await line.stop()
    line.say(b"too late")
    line.link.stop(1.0)
    await turns()
    assert line.script.to_say
