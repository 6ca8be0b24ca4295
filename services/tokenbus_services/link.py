"""The connection of a worker or a client to its processor: a session decides what to send, and a link sends it."""

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import Protocol

from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.client_pb2 import ClientWelcome
from tokenbus_contracts.generated.stream_pb2 import GoodbyeReason, Heartbeat, Refusal, RefusalReason, Welcome
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


class Session(Protocol):
    """One side of a protocol, without sockets and without a clock of its own."""

    state: SessionState
    processor_id: str
    handshakes: int
    refusal: Refusal | None

    @property
    def outstanding(self) -> int:
        """How many items or requests the processor has not answered yet."""

    def receive(self, parts: list[bytes], now: float) -> None:
        """Take one transport message; a ContractError says what is wrong with it, and nothing changes then."""

    def next_message(self, now: float) -> list[bytes] | None:
        """Return the next message to send, or None."""

    def seconds_to_wait(self, now: float) -> float:
        """Return after how many seconds to ask `next_message` again, even if nothing happens."""

    def goodbye(self, reason: GoodbyeReason, message: str = "") -> list[bytes]:
        """Leave: return the last message to send."""


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
        self.state = SessionState.GREETING
        self.processor_id = ""
        self.refusal: Refusal | None = None
        self.handshakes = 0

    @abstractmethod
    def _hello(self) -> list[bytes]:
        """Return the message that begins the handshake."""

    @abstractmethod
    def _next(self, now: float) -> list[bytes] | None:
        """Return the next message to a connected processor, or None."""

    def next_message(self, now: float) -> list[bytes] | None:
        """Return the next message to send, or None: there is none, or no credit for it."""
        if self.state is SessionState.OPEN and now - self._last_heard > self._timeout:
            self._greet_again(now)
        if self.state in (SessionState.GREETING, SessionState.REFUSED):
            return self._greeting(now)
        if self.state is SessionState.LEFT:
            return None
        message = self._next(now)
        if message is not None:
            self._last_sent = now
        return message

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
        return self._hello()

    def _greet_again(self, at: float) -> None:
        self.state = SessionState.GREETING
        self._next_greeting = at

    def _welcomed(self, welcome: Welcome | ClientWelcome) -> None:
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

    def _heartbeat(self, now: float, *, at_once: bool = False) -> Heartbeat | None:
        """Return a heartbeat, if it is time for one."""
        if now - self._last_sent < self._interval and not at_once:
            return None
        return Heartbeat(sent_at_ns=max(1, int(now * _NS)), echo_ns=self._echo_ns)


def check_times(welcome: Welcome | ClientWelcome) -> None:
    """Refuse a welcome with contradicting times."""
    if welcome.heartbeat_timeout_ms <= welcome.heartbeat_interval_ms:
        limit = f"above heartbeat_interval_ms, {welcome.heartbeat_interval_ms}"
        raise ContractError("welcome.heartbeat_timeout_ms", limit, welcome.heartbeat_timeout_ms)


class Link:
    """Runs a session over a connection until it is told to stop; the lock guards the session."""

    def __init__(self, session: Session, lock: AbstractContextManager[object], clock: Clock, name: str) -> None:
        """Take the session, the lock under which it may be used, the clock, and a name for the log."""
        self._log = logger(name)
        self._session = session
        self._lock = lock
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._woken = False
        self._stopping = asyncio.Event()
        self._progress = asyncio.Event()
        self._drain_seconds = 0.0
        self._repeated_log = DeduplicatedLog()
        self.thread_id = 0
        self.refused_frames = 0

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop it runs on, once it does."""
        return self._loop

    def wake(self) -> None:
        """Wake the sender: there may be something to send. Any thread may call this, with the lock held."""
        # One call into the loop, however many items wait: each of them costs a system call.
        if not self._woken and self._loop is not None:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop has closed: nothing is sent any more
                self._loop.call_soon_threadsafe(self._wake.set)

    async def run(self, transport: Transport, address: str, started: Callable[[], None]) -> None:
        """Connect, carry messages until told to stop, drain, and say goodbye."""
        self._loop = asyncio.get_running_loop()
        self.thread_id = threading.get_ident()
        connection = await transport.connect(address)
        started()
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
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)

    async def _drain(self) -> None:
        deadline = self._clock.now() + self._drain_seconds
        while (remaining := deadline - self._clock.now()) > 0:
            self._progress.clear()
            with self._lock:
                if not self._session.outstanding:
                    return
            await self._clock.wait(self._progress, remaining)
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
            self._progress.set()
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
