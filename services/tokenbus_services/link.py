"""The connection of a worker or a client to its processor: a session decides what to send, and a link sends it."""

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import Any

from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.client_pb2 import ClientHello, ClientWelcome, ServerFrame
from tokenbus_contracts.generated.stream_pb2 import (
    Goodbye,
    GoodbyeReason,
    Heartbeat,
    Hello,
    ProcessorFrame,
    Refusal,
    RefusalReason,
    Welcome,
)
from tokenbus_services.bus import Connection, Transport
from tokenbus_services.clock import Clock
from tokenbus_services.logs import DeduplicatedLog, logger

_FULL_WAIT = 0.005
_NS = 1_000_000_000
PROOF_BYTES = 16
"""The length of the proof that a session draws once, and shows in each hello: a peer that has it is the same life."""


class SessionState(Enum):
    """Where a worker or a client stands with its processor."""

    GREETING = auto()
    """It says hello repeatedly, until the processor answers."""
    OPEN = auto()
    """The handshake is done."""
    REFUSED = auto()
    """The processor refused it; it says hello again after a while."""
    LEFT = auto()
    """It said goodbye."""


class ReconnectingSession(ABC):
    """What worker and client sessions share: the handshake, repeated after refusals and silence, and heartbeats."""

    def __init__(self, interval: float, timeout: float) -> None:
        """Take the interval of heartbeats and the silence after which the processor is lost, in seconds."""
        self._interval = interval
        self._timeout = timeout
        self._next_greeting = 0.0
        self._last_sent = 0.0
        self._last_heard = 0.0
        self._echo_ns = 0
        self._is_news = False
        """Whether the next heartbeat says something that the processor does not know: it is sent at once."""
        self.state = SessionState.GREETING
        self.processor_id = ""
        self.refusal: Refusal | None = None
        self.handshakes = 0

    @property
    @abstractmethod
    def outstanding(self) -> int:
        """How many items or requests the processor has not answered yet."""

    @abstractmethod
    def _read(self, parts: list[bytes]) -> ProcessorFrame | ServerFrame:
        """Return the frame of a transport message."""

    @abstractmethod
    def _written(self, **body: Any) -> bytes:  # noqa: ANN401 - messages
        """Return a frame with that body, as it is sent."""

    @abstractmethod
    def _hello(self) -> Hello | ClientHello:
        """Return what begins the handshake."""

    @abstractmethod
    def _welcome(self, welcome: Any) -> None:  # noqa: ANN401 - a Welcome or a ClientWelcome
        """Take the processor's answer to the hello."""

    @abstractmethod
    def _take(self, frame: Any, body: str, parts: list[bytes], now: float) -> None:  # noqa: ANN401 - as `_read` returns it
        """Take a frame of the connected processor, with the message's parts behind it."""

    @abstractmethod
    def _next(self) -> list[bytes] | None:
        """Return the next message to a connected processor, but for heartbeats, or None."""

    @property
    def _last_sequence(self) -> int:
        """The last sequence that was sent, or zero."""
        return 0

    def receive(self, parts: list[bytes], now: float) -> None:
        """Take one transport message; a ContractError says what is wrong with it, and changes nothing."""
        frame = self._read(parts)
        body = frame.WhichOneof("body")
        if body is None or self.state is SessionState.LEFT:
            return
        if body == "welcome":
            self._welcome(frame.welcome)
        elif body == "refusal":
            self._refused(frame.refusal, now)
        elif self.state is SessionState.OPEN:
            if body == "heartbeat":
                self._echo_ns = frame.heartbeat.sent_at_ns
            elif body == "goodbye":
                self._greet_again(now + self._interval)
            else:
                self._take(frame, body, parts[1:], now)
        self._last_heard = now

    def next_message(self, now: float) -> list[bytes] | None:
        """Return the next message to send, or None: there is none, or no credit for it."""
        if self.state is SessionState.OPEN and now - self._last_heard > self._timeout:
            self._greet_again(now)
        if self.state in (SessionState.GREETING, SessionState.REFUSED):
            return self._greeting(now)
        if self.state is SessionState.LEFT:
            return None
        message = self._next()
        if message is None and (self._is_news or now - self._last_sent >= self._interval):
            self._is_news = False
            message = [self._written(heartbeat=self._heartbeat(now))]
        if message is not None:
            self._last_sent = now
        return message

    def goodbye(self, reason: GoodbyeReason, message: str = "") -> list[bytes]:
        """Leave, and return the last message to send."""
        self.state = SessionState.LEFT
        goodbye = Goodbye(reason=reason, message=message, last_sequence=self._last_sequence)
        return [self._written(goodbye=goodbye)]

    def seconds_to_wait(self, now: float) -> float:
        """Return after how long `next_message` has something to say even if nothing happens, at most an interval."""
        if self.state in (SessionState.GREETING, SessionState.REFUSED):
            return max(0.0, min(self._next_greeting - now, self._interval))
        return max(0.0, min(self._last_sent + self._interval - now, self._interval))

    def _greeting(self, now: float) -> list[bytes] | None:
        if now < self._next_greeting:
            return None
        self.state = SessionState.GREETING
        self._next_greeting = now + self._interval
        return [self._written(hello=self._hello())]

    def _greet_again(self, at: float) -> None:
        self.state = SessionState.GREETING
        self._next_greeting = at

    def _welcomed(self, welcome: Welcome | ClientWelcome) -> None:
        """Be connected; a ContractError says which of the processor's times contradict each other."""
        if welcome.heartbeat_timeout_ms <= welcome.heartbeat_interval_ms:
            limit = f"above heartbeat_interval_ms, {welcome.heartbeat_interval_ms}"
            raise ContractError("welcome.heartbeat_timeout_ms", limit, welcome.heartbeat_timeout_ms)
        self.state = SessionState.OPEN
        self.refusal = None
        self.processor_id = welcome.processor_id
        self.handshakes += 1
        self._interval = welcome.heartbeat_interval_ms / 1000
        self._timeout = welcome.heartbeat_timeout_ms / 1000

    def _refused(self, refusal: Refusal, now: float) -> None:
        if refusal.reason == RefusalReason.REFUSAL_REASON_HELLO_FIRST:
            if self.state is SessionState.OPEN:
                self._greet_again(now)
            return
        self.state = SessionState.REFUSED
        self.refusal = refusal
        self._next_greeting = now + self._timeout

    def _heartbeat(self, now: float) -> Heartbeat:
        sent_at = max(1, int(now * _NS))
        return Heartbeat(sent_at_ns=sent_at, echo_ns=self._echo_ns, last_sequence=self._last_sequence)


class Link:
    """Runs a session over a connection until it is told to stop; the lock guards the session."""

    def __init__(
        self, session: ReconnectingSession, lock: AbstractContextManager[object], clock: Clock, name: str
    ) -> None:
        """Take the session, the lock under which it may be used, the clock, and a name for the log."""
        self._log = logger(name)
        self._session = session
        self._lock = lock
        self._clock = clock
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop it runs on, once it does."""
        self._wake = asyncio.Event()
        self._woken = False
        self._stopping = asyncio.Event()
        self.progress = asyncio.Event()
        """Set after each message that was taken."""
        self._drain_seconds = 0.0
        self._repeated_log = DeduplicatedLog()
        self.thread_id = 0
        self.refused_frames = 0

    def wake(self) -> None:
        """Wake the sender: there may be something to send. Any thread may call this, with the lock held."""
        # One call into the loop, however many items wait: each of them costs a system call.
        if not self._woken and self.loop is not None:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop has closed: nothing is sent any more
                self.loop.call_soon_threadsafe(self._wake.set)

    async def start(self, transport: Transport, address: str) -> asyncio.Task[None]:
        """Connect; return the task that carries messages until it is told to stop, drains, and says goodbye."""
        self.loop = asyncio.get_running_loop()
        self.thread_id = threading.get_ident()
        return asyncio.create_task(self._run(await transport.connect(address)))

    async def _run(self, connection: Connection) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                carriers = [tasks.create_task(self._receive(connection)), tasks.create_task(self._send(connection))]
                await self._stopping.wait()
                await self._drain()
                for carrier in carriers:
                    carrier.cancel()
        finally:
            with self._lock:
                farewell = self._session.goodbye(GoodbyeReason.GOODBYE_REASON_STOPPED)
            connection.send(farewell)
            await connection.close()

    def stop(self, drain_seconds: float) -> None:
        """End once all is acknowledged, or after so many seconds. Any thread may call this."""
        self._drain_seconds = drain_seconds
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._stopping.set)

    async def _drain(self) -> None:
        deadline = self._clock.now() + self._drain_seconds
        while (remaining := deadline - self._clock.now()) > 0:
            self.progress.clear()
            with self._lock:
                if not self._session.outstanding:
                    return
            await self._clock.wait(self.progress, remaining)
        with self._lock:
            left = self._session.outstanding
        if left:
            self._log.error("drain timed out", unacknowledged=left)

    async def _receive(self, connection: Connection) -> None:
        while True:
            parts = await connection.receive()
            now = self._clock.now()
            try:
                with self._lock:
                    before = self._session.state
                    self._session.receive(parts, now)
                    after = self._session.state
                    self._woken = True
            except ContractError as error:
                self.refused_frames += 1
                self._repeated_log.begin("processor", self._log.warning, "frame refused", reason=str(error))
                continue
            self._wake.set()
            self.progress.set()
            if after is not before:
                self._log_state(after)

    async def _send(self, connection: Connection) -> None:
        pending: list[bytes] | None = None
        while True:
            with self._lock:
                self._woken = False
                self._wake.clear()
            while True:
                if pending is None:
                    with self._lock:
                        pending = self._session.next_message(self._clock.now())
                if pending is None or not connection.send(pending):
                    break
                pending = None
            with self._lock:
                seconds = self._session.seconds_to_wait(self._clock.now())
            # Nothing announces that a full connection has room again, so look again soon.
            await self._clock.wait(self._wake, seconds if pending is None else _FULL_WAIT)

    def _log_state(self, state: SessionState) -> None:
        session = self._session
        if state is SessionState.REFUSED and session.refusal is not None:
            self._log.error("refused by processor", reason=session.refusal.message)
        elif state is SessionState.OPEN:
            self._log.info("connected", processor=session.processor_id, handshakes=session.handshakes)
        elif state is SessionState.GREETING:
            self._log.warning("processor asks for a new handshake")
