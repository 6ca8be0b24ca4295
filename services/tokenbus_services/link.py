"""What connects a worker or a client to its processor: a session that knows what to say, and a link that says it."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import Protocol

from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.stream_pb2 import GoodbyeReason, Refusal
from tokenbus_services.bus import Connection, Transport
from tokenbus_services.clock import Clock
from tokenbus_services.logs import DeduplicatedLog, logger

_FULL_WAIT = 0.005


class SessionState(Enum):
    """Where a worker or a client stands with its processor."""

    GREETING = auto()
    """It says hello, again and again, until it is answered."""
    OPEN = auto()
    """The handshake is done."""
    REFUSED = auto()
    """It was told why not; it says hello again after a while."""
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
        """How many things a processor still has to answer for."""

    def receive(self, parts: list[bytes], now: float) -> None:
        """Take one transport message; a ContractError says what is wrong with it, and changes nothing."""

    def next_message(self, now: float) -> list[bytes] | None:
        """Return the next message to send, or None: there is nothing to say just now."""

    def seconds_to_wait(self, now: float) -> float:
        """Return after how long `next_message` has something to say even if nothing happens."""

    def goodbye(self, reason: GoodbyeReason, message: str = "") -> list[bytes]:
        """Leave: return the last message to send."""


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
        """Tell the coroutine that there may be something to send; any thread may call this, with the lock held."""
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
        """Tell the coroutine to end once all is acknowledged, or after so many seconds; any thread may call this."""
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
            self._log.error("left before the processor had answered for everything", unanswered=left)

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
                self._tell(after)

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
            # A full connection has room again when the other side has read: nothing tells, so look again soon.
            await self._clock.wait(self._wake, seconds if pending is None else _FULL_WAIT)

    def _tell(self, state: SessionState) -> None:
        session = self._session
        if state is SessionState.REFUSED and session.refusal is not None:
            self._log.error("refused by processor", reason=session.refusal.message)
        elif state is SessionState.OPEN:
            self._log.info("connected", processor=session.processor_id, handshakes=session.handshakes)
        elif state is SessionState.GREETING:
            self._log.warning("processor wants the handshake again")
