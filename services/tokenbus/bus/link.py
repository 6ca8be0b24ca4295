"""The connection of a worker or client to its processor: a session creates the messages, and a link sends them."""

import asyncio
import contextlib
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from enum import Enum, auto
from math import inf
from typing import Any

from tokenbus.backports import TaskGroup
from tokenbus.bus import Connection, Transport
from tokenbus.clock import Clock
from tokenbus.logs import DeduplicatedLog, logger
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

_FULL_WAIT = 0.005
_UNANSWERED_SECONDS, _STILL_UNANSWERED_SECONDS = 3.0, 30.0
"""Seconds without an answer before the first warning, and seconds between later warnings."""
_MAX_DOUBLINGS = 16
_NS = 1_000_000_000
PROOF_BYTES = 16
"""Length of the random proof in each hello; the proof identifies one incarnation of the peer."""


class SessionState(Enum):
    """State of a session with its processor."""

    GREETING = auto()
    """The session repeats its hello until the processor answers."""
    OPEN = auto()
    REFUSED = auto()
    """The processor refused the session, which repeats its hello later."""
    LEFT = auto()


class ReconnectingSession(ABC):
    """Common base of worker and client sessions: heartbeats, handshakes, and reactions to refusals and silence.

    With several processors, the session greets them in turn; the first processor that welcomes it becomes its home.
    After losing its home, the session waits `abandon_after` seconds for it, and then tries all processors in turn.
    """

    def __init__(self, interval: float, timeout: float, processors: int = 1, abandon_after: float = 0.0) -> None:
        """Create a session; all times are in seconds, and `timeout` is the silence after which a processor is lost."""
        self.interval = interval
        self.timeout = timeout
        self._processors = processors
        self._abandon_after = abandon_after
        self.address_index = 0
        """Index of the current processor in the list of addresses."""
        self.home: int | None = None
        """Index of the processor that last welcomed the session."""
        self._leaves_at = inf
        self._stays_until = -inf  # until this time the session tries only its home processor
        self._tries = 0  # number of processors tried in vain since the last welcome
        self._next_greeting = 0.0
        self._hellos = 0  # hellos sent since the processor last answered one
        self._last_sent = 0.0
        self._last_heard = 0.0
        self._echo_ns = 0
        self._is_news = False  # whether a heartbeat is due at once, because it carries news for the processor
        self.state = SessionState.GREETING
        self.processor_id = ""
        self.refusal: Refusal | None = None
        self.loss = ""
        """Reason why the processor was lost, or empty once the reason was logged."""
        self.handshakes = 0

    @property
    @abstractmethod
    def outstanding(self) -> int:
        """Number of items or requests that the processor has not answered yet."""

    @abstractmethod
    def _decode(self, parts: list[bytes]) -> ProcessorFrame | ServerFrame:
        """Decode a message's frame; raises ContractError if the frame is invalid."""

    @abstractmethod
    def _encode(self, **body: Any) -> bytes:  # noqa: ANN401 - messages
        """Return the bytes of a frame with the given body."""

    @abstractmethod
    def _hello(self) -> Hello | ClientHello:
        """Return the hello that begins the handshake."""

    @abstractmethod
    def _welcome(self, welcome: Any) -> None:  # noqa: ANN401 - a Welcome or a ClientWelcome
        """Handle the processor's answer to the hello."""

    @abstractmethod
    def _handle(self, frame: Any, body: str, parts: list[bytes], now: float) -> None:  # noqa: ANN401 - as `_decode` returns it
        """Handle a frame of the open session; `parts` are the remaining parts of the message."""

    @abstractmethod
    def _next_data(self) -> list[bytes] | None:
        """Return the next message other than a heartbeat, or None if no message is due."""

    @property
    def _last_sequence(self) -> int:
        return 0

    def receive(self, parts: list[bytes], now: float) -> None:
        """Handle one message; raises ContractError for an invalid message, which changes nothing."""
        frame = self._decode(parts)
        body = frame.WhichOneof("body")
        if body is None or self.state is SessionState.LEFT:
            return
        self._last_heard = now
        if body == "welcome":
            self._welcome(frame.welcome)
        elif body == "refusal":
            self._handle_refusal(frame.refusal, now)
        elif self.state is SessionState.OPEN:
            if body == "heartbeat":
                self._echo_ns = frame.heartbeat.sent_at_ns
            elif body == "goodbye":
                self.loss = f"it closes: {frame.goodbye.message}".removesuffix(": ")
                self._greet_again(now + self.interval)
                if self._processors > 1:
                    self._leaves_at = self._stays_until = now
            else:
                self._handle(frame, body, parts[1:], now)

    def excuse(self, seconds: float, now: float) -> None:
        """Reduce the processor's time of silence by the `seconds` for which this process was suspended."""
        self._last_heard = min(now, self._last_heard + seconds)

    def silence(self, now: float) -> float:
        """Return the seconds since the processor's last message, or infinity before the first welcome."""
        return now - self._last_heard if self.handshakes else inf

    def disconnected(self, now: float) -> None:
        if self.state is SessionState.OPEN:
            self._greet_again(now)

    def next_message(self, now: float) -> list[bytes] | None:
        """Return the next message to send, or None if no message is due or the credit is used up."""
        if self.state is SessionState.OPEN and now - self._last_heard > self.timeout:
            self.loss = f"silent for {round((now - self._last_heard) * 1000)} ms"
            self._greet_again(now)
        if self.is_leaving(now):
            return None
        if self.state in (SessionState.GREETING, SessionState.REFUSED):
            return self._greeting(now)
        if self.state is SessionState.LEFT:
            return None
        message = self._next_data()
        if message is None and (self._is_news or now - self._last_sent >= self.interval):
            self._is_news = False
            message = [self._encode(heartbeat=self._heartbeat(now))]
        if message is not None:
            self._last_sent = now
        return message

    def goodbye(self, reason: GoodbyeReason, message: str = "") -> list[bytes]:
        """Leave the session, and return its last message."""
        self.state = SessionState.LEFT
        return [self._encode(goodbye=Goodbye(reason=reason, message=message, last_sequence=self._last_sequence))]

    def seconds_to_wait(self, now: float) -> float:
        """Return the seconds until `next_message` must be called again, at most one heartbeat interval."""
        if self.state in (SessionState.GREETING, SessionState.REFUSED):
            return max(0.0, min(self._next_greeting - now, self._leaves_at - now, self.interval))
        return max(0.0, min(self._last_sent + self.interval - now, self._leaves_at - now, self.interval))

    def is_leaving(self, now: float) -> bool:
        """Return whether the session must move to another processor, and so sends nothing to the current one."""
        return now >= self._leaves_at

    def move(self, now: float) -> None:
        self.address_index = (self.address_index + 1) % self._processors
        self._tries += 1
        self._leaves_at = inf
        self._greet_again(now)

    @property
    def asks_another(self) -> bool:
        """Whether the session greets a processor that is not its home."""
        return self.home not in {None, self.address_index}

    @property
    def _patience(self) -> float:
        """Seconds for which the session tries each processor.

        The value doubles with each round over all processors, because a slow processor may need longer to answer.
        """
        rounds = min(self._tries // self._processors, _MAX_DOUBLINGS)
        return min(self.timeout, self.interval * 2.0**rounds)

    def _greeting(self, now: float) -> list[bytes] | None:
        if now < self._next_greeting:
            return None
        if self._processors > 1 and self._leaves_at == inf:
            self._leaves_at = now + self._patience
            if not self.asks_another:
                self._leaves_at = max(self._leaves_at, self._stays_until)
        self.state = SessionState.GREETING
        self._next_greeting = now + self._pause()
        return [self._encode(hello=self._hello())]

    def _pause(self) -> float:
        """Return a random number of seconds until the next hello; the range doubles with each hello.

        The randomness keeps many peers from greeting one processor at the same moment.
        """
        most = min(self.interval * 2.0 ** min(self._hellos, _MAX_DOUBLINGS), self.timeout)
        self._hellos += 1
        return random.uniform(self.interval, max(self.interval, most))  # noqa: S311 - nothing secret

    def _greet_again(self, at: float) -> None:
        if self.state is SessionState.OPEN:
            self._stays_until = self._last_heard + self._abandon_after
        self.state = SessionState.GREETING
        self._next_greeting = at

    def _welcomed(self, welcome: Welcome | ClientWelcome) -> None:
        """Open the session; raises ContractError unless the heartbeat timeout exceeds the heartbeat interval."""
        if welcome.heartbeat_timeout_ms <= welcome.heartbeat_interval_ms:
            limit = f"above heartbeat_interval_ms, {welcome.heartbeat_interval_ms}"
            raise ContractError("welcome.heartbeat_timeout_ms", limit, welcome.heartbeat_timeout_ms)
        self.state = SessionState.OPEN
        self.refusal = None
        self.home = self.address_index
        self._tries, self._hellos, self._leaves_at = 0, 0, inf
        self.processor_id = welcome.processor_id
        self.handshakes += 1
        self.interval = welcome.heartbeat_interval_ms / 1000
        self.timeout = welcome.heartbeat_timeout_ms / 1000

    def _handle_refusal(self, refusal: Refusal, now: float) -> None:
        if refusal.reason == RefusalReason.REFUSAL_REASON_HELLO_FIRST:
            if self.state is SessionState.OPEN:
                self._greet_again(now)
            return
        self.state = SessionState.REFUSED
        most = 1 if self.refusal is None else 2
        self.refusal = refusal
        self._hellos = 0
        self._next_greeting = now + self.timeout * random.uniform(1, most)  # noqa: S311 - nothing secret
        # If a processor is full or is not the session's home, the session tries another processor.
        # Any other refusal has a cause that an operator must correct, so the session stays at the processor.
        self._leaves_at = inf
        is_full = refusal.reason == RefusalReason.REFUSAL_REASON_TOO_MANY_WORKERS
        if self._processors > 1 and (is_full or self.asks_another):
            self._leaves_at = now if self._tries < self._processors - 1 else now + self._patience

    def _heartbeat(self, now: float) -> Heartbeat:
        sent_at = max(1, int(now * _NS))
        return Heartbeat(sent_at_ns=sent_at, echo_ns=self._echo_ns, last_sequence=self._last_sequence)


class Link:
    """Runs a session over a connection until `stop` is called; the lock guards the session."""

    def __init__(
        self, session: ReconnectingSession, lock: AbstractContextManager[object], clock: Clock, name: str
    ) -> None:
        self._log = logger(name)
        self._setting = f"bus.{name}s_address"
        self._session = session
        self._lock = lock
        self._clock = clock
        self._connection: Connection
        self._addresses: Sequence[str]
        self.loop: asyncio.AbstractEventLoop | None = None
        self._sends_on: Connection | None = None  # the connection on which `_send_now` may send
        self._unsent: list[bytes] | None = None  # a message that the connection rejected because its queue was full
        self._error: Exception | None = None  # an exception from `_send_now`, which the sending task re-raises
        self._wake = asyncio.Event()
        self._woken = False
        self._wakes_at = 0.0
        self._stopping = asyncio.Event()
        self.progress = asyncio.Event()
        self._drain_seconds = 0.0
        self._repeated_log = DeduplicatedLog()
        self._warns_at: float | None = None
        self._connections = 0
        self.thread_id = 0
        self.refused_frames = 0

    def wake(self) -> None:
        """Make the loop send soon; any thread that holds the lock may call this."""
        # One call into the event loop sends all waiting items, because each call costs a system call.
        if not self._woken and self.loop is not None:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the event loop has closed
                self.loop.call_soon_threadsafe(self._send_now)

    async def start(self, transport: Transport, addresses: Sequence[str]) -> asyncio.Task[None]:
        """Connect to the current processor, and to the next one whenever the session moves.

        The returned task transfers messages until `stop` is called, then drains the session and says goodbye.
        """
        self.loop = asyncio.get_running_loop()
        self.thread_id = threading.get_ident()
        self._addresses = addresses
        self._connection = await self._connect(transport)
        return asyncio.create_task(self._run(transport))

    async def _run(self, transport: Transport) -> None:
        try:
            async with TaskGroup() as tasks:
                carrying = tasks.create_task(self._carry(transport))
                await self._stopping.wait()
                await self._drain()
                carrying.cancel()
        finally:
            with self._lock:
                farewell = self._session.goodbye(GoodbyeReason.GOODBYE_REASON_STOPPED)
            self._connection.send(farewell)
            await self._connection.close()

    async def _carry(self, transport: Transport) -> None:
        while True:
            connection = self._connection
            async with TaskGroup() as tasks:
                receiving = tasks.create_task(self._receive(connection))
                await self._send(connection)
                receiving.cancel()
            with self._lock:
                self._session.move(self._clock.now())
            self._log.info("asking another processor", address=self._address)
            self._connection = await self._connect(transport)
            await connection.close()

    @property
    def _address(self) -> str:
        return self._addresses[self._session.address_index]

    async def _connect(self, transport: Transport) -> Connection:
        address = self._address
        self._connections = number = self._connections + 1

        def lost() -> None:
            if number == self._connections:  # the session still uses this connection
                with self._lock:
                    self._session.disconnected(self._clock.now())
                self._wake.set()
                self._log.info("connection lost", address=address)

        return await transport.connect(address, lost=lost)

    def stop(self, drain_seconds: float) -> None:
        """End the session after the processor's last answer or after `drain_seconds`; any thread may call this."""
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
        if left and self._drain_seconds:
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
                    is_due, self._woken = not self._woken, True
            except ContractError as error:
                self.refused_frames += 1
                self._repeated_log.begin("processor", self._log.warning, "frame refused", reason=str(error))
                continue
            if is_due and self.loop is not None:
                self.loop.call_soon(self._send_now)  # one call answers all messages that have arrived
            self.progress.set()
            if after is not before:
                self._wake.set()
                self._log_state(after)

    async def _send(self, connection: Connection) -> None:
        """Send each message when it is due, until the session moves; `_send_now` can send without this task."""
        self._unsent, self._sends_on = None, connection
        try:
            while True:
                self._wake.clear()
                if self._error is not None:
                    raise self._error
                is_full = not self._send_all(connection)
                self._warn_if_unanswered()
                with self._lock:
                    if self._session.is_leaving(self._clock.now()):
                        return
                    seconds = self._session.seconds_to_wait(self._clock.now())
                    self._wakes_at = self._clock.now() + seconds
                # A connection does not signal when its queue is no longer full, so this loop polls the connection.
                await self._clock.wait(self._wake, _FULL_WAIT if is_full else seconds)
        finally:
            self._sends_on = None

    def _send_all(self, connection: Connection) -> bool:
        now = self._clock.now()
        with self._lock:
            self._woken = False
            if now > self._wakes_at:
                self._session.excuse(now - self._wakes_at, now)
                self._wakes_at = now
        while True:
            if self._unsent is None:
                with self._lock:
                    self._unsent = self._session.next_message(self._clock.now())
            if self._session.loss:
                self._log_state(SessionState.GREETING)
            if self._unsent is None:
                return True
            if not connection.send(self._unsent):
                return False
            self._unsent = None

    def _send_now(self) -> None:
        """Send from the current callback, without a switch to the sending task.

        Wake the sending task only if an error occurred, the connection is full, the session must move to another
        processor, or a message is due before the task's next timeout.
        """
        connection = self._sends_on
        if connection is None:
            self._wake.set()
            return
        try:
            is_sent = self._send_all(connection)
        except Exception as error:  # noqa: BLE001 - the sending task raises the error
            self._error, is_sent = error, False
        with self._lock:
            now = self._clock.now()
            is_due = self._session.is_leaving(now) or now + self._session.seconds_to_wait(now) < self._wakes_at
        if is_due or not is_sent:
            self._wake.set()

    def _warn_if_unanswered(self) -> None:
        now = self._clock.now()
        if self._session.state is not SessionState.GREETING:
            self._warns_at = None
        elif self._warns_at is None:
            self._warns_at = now + _UNANSWERED_SECONDS
        elif now >= self._warns_at:
            self._warns_at = now + _STILL_UNANSWERED_SECONDS
            remedy = "start a processor there, or correct the setting"
            if self.refused_frames:
                remedy = "the process there is not a processor, or this is its other address: correct the setting"
            self._log.warning("no processor answers", address=self._address, setting=self._setting, remedy=remedy)

    def _log_state(self, state: SessionState) -> None:
        session = self._session
        if state is SessionState.REFUSED and session.refusal is not None:
            self._log.error("refused by processor", reason=session.refusal.message)
        elif state is SessionState.OPEN:
            self._log.info("connected", processor=session.processor_id, handshakes=session.handshakes)
        elif session.loss:
            self._log.warning("processor lost", reason=session.loss)
            session.loss = ""
        elif state is SessionState.GREETING:
            self._log.warning("processor asks for a new handshake")
