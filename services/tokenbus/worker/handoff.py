"""Hand-offs: a prefill worker sends its requests to decode workers, which accept each once and go on with it."""

import asyncio
import contextlib
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any
from zlib import crc32

from tokenbus.bus import ClosedError, Connection, Listener, Role, Transport
from tokenbus.bus.handoff_tickets import Tickets
from tokenbus.bus.transport import LARGE, UnadmittedBudget
from tokenbus.clock import Clock, SystemClock
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.settings import Settings
from tokenbus.worker.publisher import Publisher, ReceivedHandoff, WorkerCounts
from tokenbus.worker.session import HandoffPoint
from tokenbus_contracts import ContractError, Rule
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.handoff_pb2 import DecodeFrame, Handoff, HandoffReply, PrefillFrame
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_contracts.schema import MAJOR

_log = logger("worker")
_MOST_REFUSAL = 1000
_MOST_ADMITTED = 4096
_TRIES = 4
"""How often a hand-off is sent until its timeout, while no answer comes."""
_FULL_WAIT = 0.005
_USED = "its ticket was used before, or is void: its request ended or went elsewhere"
_Target = tuple[str, bytes]
"""A decode worker's address and public key, empty where it asks for none: a restarted one may have another key."""


@dataclass(slots=True)
class _Pending:
    key: int
    parts: list[bytes]
    target: _Target
    deadline: float
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: str = ""


class HandoffSender:
    """Sends a prefill worker's hand-offs while `async with` lasts, and reports those that no decode worker accepts."""

    def __init__(
        self,
        settings: Settings,
        transport: Transport,
        clock: Clock,
        counts: WorkerCounts,
        failed: Callable[[int, str], None],
    ) -> None:
        """Take a prefill worker's settings, its counters, and a callback for a request that no decode worker accepts.

        The callback gets the request id and the reason, in a thread of its own, where it may block.
        """
        self.counts = counts
        self._settings = settings
        self._transport = transport
        self._clock = clock
        self._failed = failed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: dict[int, _Pending] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._connecting = asyncio.Lock()
        self._connections: OrderedDict[_Target, tuple[Connection, asyncio.Task[None]]] = OrderedDict()
        self._repeated_log = DeduplicatedLog()

    async def __aenter__(self) -> "HandoffSender":
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until each hand-off is answered or has timed out, and close the connections."""
        await asyncio.sleep(0)  # what other threads have sent begins
        if error is not None:
            for task in self._tasks:
                task.cancel()
        while self._tasks:  # each ends by its timeout
            await asyncio.wait(self._tasks)
        self._loop = None
        for target in list(self._connections):
            await self._close(target)

    @property
    def pending(self) -> int:
        """How many hand-offs are not answered yet."""
        return len(self._pending)

    def send(self, generate: Generate, state: bytes) -> None:
        """Hand a request off, from any thread. Raises ValueError, with the reason, if it cannot be sent."""
        worker, bus = self._settings.worker, self._settings.bus
        if not generate.handoff_address:
            raise ValueError("no decode worker is available")
        if len(state) > bus.max_part_bytes:
            raise ValueError(f"its state: at most {bus.max_part_bytes} bytes, got {len(state)}")
        if self.pending >= worker.max_requests:
            raise ValueError(f"at most {worker.max_requests} hand-offs that are not answered yet")
        number = secrets.randbits(63) + 1
        try:
            parts = handoff_of(generate, state, number, self._settings)
        except ContractError as error:
            raise ValueError(str(error)) from None
        target = generate.handoff_address, generate.handoff_server_key
        deadline = self._clock.now() + worker.handoff_timeout_ms / 1000
        self._pending[number] = pending = _Pending(generate.request_key, parts, target, deadline)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: the worker has left
                self._loop.call_soon_threadsafe(self._begin, number, pending)

    def _begin(self, number: int, pending: _Pending) -> None:
        if self._loop is not None:
            self.counts.handing_off = len(self._pending)
            task = self._loop.create_task(self._hand_off(number, pending))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _hand_off(self, number: int, pending: _Pending) -> None:
        why = await self._failure(pending)
        del self._pending[number]
        self.counts.handing_off = len(self._pending)
        if not why:
            self.counts.handed_off += 1
            return
        self.counts.untaken += 1
        self._repeated_log.begin("handoff", _log.error, "hand-off failed", reason=why, request=f"{pending.key:016x}")
        # In a thread, as it may block until retention has room.
        await asyncio.to_thread(self._failed, pending.key, why)

    async def _failure(self, pending: _Pending) -> str:
        timeout, where = self._settings.worker.handoff_timeout_ms, f"the decode worker at {pending.target[0]}"
        while (remaining := pending.deadline - self._clock.now()) > 0:
            try:
                connection = await self._connection(pending.target)
                pause = timeout / 1000 / _TRIES if connection.send(pending.parts) else _FULL_WAIT
            except Exception as error:  # noqa: BLE001 - it ends this hand-off, and not the sender
                return f"{where} cannot be reached: {error}"
            if await self._clock.wait(pending.answered, min(pause, remaining)):
                return f"{where} refused it: {pending.refusal}" if pending.refusal else ""
        return f"{where} did not answer for {timeout} ms"

    async def _connection(self, target: _Target) -> Connection:
        async with self._connecting:
            if target not in self._connections:
                if len(self._connections) >= self._settings.worker.handoff_connections:
                    await self._close(next(iter(self._connections)))
                connection = await self._transport.connect(*target)
                self._connections[target] = connection, asyncio.create_task(self._receive(connection))
            self._connections.move_to_end(target)
            return self._connections[target][0]

    async def _close(self, target: _Target) -> None:
        connection, receiving = self._connections.pop(target)
        receiving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await receiving
        await connection.close()

    async def _receive(self, connection: Connection) -> None:
        while True:
            try:
                reply = read_reply(await connection.receive())
            except ClosedError:
                return
            except ContractError as error:
                self._repeated_log.begin("reply", _log.warning, "answer to a hand-off refused", reason=str(error))
                continue
            pending = None if reply is None else self._pending.get(reply.number)
            if pending is not None and reply is not None and not pending.answered.is_set():  # the first answer counts
                pending.refusal = reply.refusal
                pending.answered.set()


class HandoffReceiver:
    """Listens for hand-offs while `async with` lasts, and queues them for the publisher's engine from `serve` on."""

    _listener: Listener
    _loop: asyncio.AbstractEventLoop
    _publisher: Publisher

    def __init__(self, settings: Settings, transport: Transport, clock: Clock | None = None) -> None:
        self._settings = settings
        self._transport = transport
        self._clock = clock or SystemClock()
        self._tickets = Tickets(self._clock)
        self.point = HandoffPoint()
        """Where prefill workers send to, with the port that the system chose, and with what processors make tickets."""
        self._task: asyncio.Task[None] | None = None
        self._repeated_log = DeduplicatedLog()
        self.counts = WorkerCounts()
        self._unadmitted = UnadmittedBudget()
        self._admitted: OrderedDict[bytes, None] = OrderedDict()
        """The peers whose hand-offs were accepted last; a refused one has to be accepted anew."""

    async def __aenter__(self) -> "HandoffReceiver":
        address = self._settings.worker.handoff_address
        self._listener = await self._transport.listen(address, self._connection_refused)
        self.point = HandoffPoint(self._listener.address, self._listener.server_key, self._tickets.key)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._listener.close()

    def serve(self, publisher: Publisher) -> None:
        """Begin to accept hand-offs, for the engine that takes its requests from a publisher."""
        self._publisher, self._loop = publisher, asyncio.get_running_loop()
        self.counts = publisher.counts
        publisher.session.on_void_ticket = partial(self._call_soon, self._tickets.void)
        self._task = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        while True:
            try:
                peer, parts = await self._listener.receive()
            except ClosedError:
                return
            size = sum(map(len, parts))
            if peer not in self._admitted and not self._unadmitted.allows(size, self._clock.now()):
                self._listener.disconnect(peer)
                continue
            try:
                handoff = self._read(peer, parts)
            except ContractError as error:
                self.counts.refused += 1
                self._repeated_log.begin("handoff", _log.warning, "hand-off refused", reason=str(error))
                if size > LARGE:
                    self._unadmitted.refused(size, self._clock.now())
                    self._admitted.pop(peer, None)
                    self._listener.disconnect(peer)
                continue
            if handoff is not None:
                self._take(peer, handoff, parts[1])

    def _connection_refused(self, reason: str) -> None:
        self.counts.refused_connections += 1
        self._repeated_log.begin("transport", _log.warning, "connection refused", reason=reason)

    def _read(self, peer: bytes, parts: list[bytes]) -> Handoff | None:
        identity = self._listener.identity(peer)
        if not identity.may(Role.HANDOFF):
            raise ContractError("key", "one with the role handoff", repr(identity.name))
        handoff = read_handoff(parts)
        if handoff is None:
            return None
        if not identity.may(Role.HANDOFF, handoff.worker_id):
            limit = f"one that the key {identity.name!r} may hand off as"
            raise ContractError("handoff.worker_id", limit, repr(handoff.worker_id))
        self._tickets.check(handoff, identity)
        check_state(handoff, parts[1])
        return handoff

    def _take(self, peer: bytes, handoff: Handoff, state: bytes) -> None:
        use = self._tickets.use_of(handoff)
        if use is not None:
            if use.number != handoff.number:
                self._decide(peer, handoff, _USED)
            elif use.answer is not None:  # it was answered, and the reply was lost
                self._reply(peer, handoff, use.answer)
            return
        self._listener.admit(peer)
        self._admitted[peer] = None
        if len(self._admitted) > _MOST_ADMITTED:
            self._admitted.popitem(last=False)
        if refusal := self._obstacle(handoff, state):
            self._decide(peer, handoff, refusal)
            return
        used = self._tickets.use(handoff)
        self.counts.waiting_state_bytes += len(state)

        def _answered(refusal: str) -> None:
            self.counts.waiting_state_bytes -= len(state)
            used.answer = refusal
            self._decide(peer, handoff, refusal)

        self._publisher.add_handoff(ReceivedHandoff(handoff.generate, state, partial(self._call_soon, _answered)))

    def _obstacle(self, handoff: Handoff, state: bytes) -> str:
        """Return why the engine is not asked to go on with a request; empty: nothing is against it."""
        has, worker = self._publisher.session.requests, self._settings.worker
        if len(has) >= worker.max_requests:
            return f"it has {worker.max_requests} requests, as many as it takes"
        if handoff.generate.request_key in has:
            return "it has an open request of that key"
        waiting = self.counts.waiting_state_bytes
        if waiting and waiting + len(state) > worker.handoff_bytes:
            limit = f"at most {worker.handoff_bytes} bytes of states that wait"
            return f"state: {limit}, got {waiting + len(state)}"
        return ""

    def _call_soon(self, call: Callable[[Any], object], argument: object) -> None:
        """Call from the event loop; the engine's and the publisher's threads come here."""
        with contextlib.suppress(RuntimeError):  # the loop has closed, and the listener with it
            self._loop.call_soon_threadsafe(call, argument)

    def _decide(self, peer: bytes, handoff: Handoff, refusal: str) -> None:
        key = handoff.generate.request_key
        if refusal:
            self.counts.refused += 1
            # Deduplicated by the field: a value that differs each time must not fill the log.
            kind = ("handoff", refusal.partition(":")[0])
            self._repeated_log.begin(kind, _log.warning, "hand-off refused", reason=refusal, request=f"{key:016x}")
        else:
            self.counts.taken_over += 1
        self._reply(peer, handoff, refusal)

    def _reply(self, peer: bytes, handoff: Handoff, refusal: str) -> None:
        self._listener.send(peer, reply_of(handoff, refusal))  # after a lost reply the hand-off is sent again


def handoff_of(generate: Generate, state: bytes, number: int, settings: Settings) -> list[bytes]:
    """Return the message that hands a request off, with its ticket; sent again, it is the same message."""
    handoff = Handoff(
        schema_major=MAJOR,
        ticket=generate.handoff_ticket,
        worker_id=settings.worker.id,
        generate=generate,
        state_bytes=len(state),
        state_crc32=crc32(state),
        number=number,
    )
    return [write_frame(PrefillFrame(handoff=handoff)), state]


def read_handoff(parts: list[bytes]) -> Handoff | None:
    """Return the hand-off in a message, or None for one of a newer minor version."""
    if len(parts) != 2:  # noqa: PLR2004 - a frame, and the state
        raise ContractError("message", "a frame and a state", f"{len(parts)} parts", rule=Rule.LENGTH)
    frame = read_frame(PrefillFrame, parts[0])
    return frame.handoff if frame.HasField("handoff") else None


def check_state(handoff: Handoff, state: bytes) -> None:
    """Raise ContractError for a state that is not the one that a hand-off describes."""
    if handoff.state_bytes != len(state):
        raise ContractError("handoff.state_bytes", f"{len(state)}, as it has", handoff.state_bytes)
    if handoff.state_crc32 != crc32(state):
        raise ContractError("handoff.state_crc32", f"{crc32(state)}, as it has", handoff.state_crc32)


def reply_of(handoff: Handoff, refusal: str) -> list[bytes]:
    """Return the answer to a hand-off; an empty refusal accepts it."""
    fitting = refusal.encode()[:_MOST_REFUSAL].decode(errors="ignore")
    reply = HandoffReply(request_key=handoff.generate.request_key, number=handoff.number, refusal=fitting)
    return [write_frame(DecodeFrame(reply=reply))]


def read_reply(parts: list[bytes]) -> HandoffReply | None:
    """Return the answer in a message, or None for one of a newer minor version."""
    if len(parts) != 1:
        raise ContractError("message", "one part", len(parts), rule=Rule.LENGTH)
    frame = read_frame(DecodeFrame, parts[0])
    return frame.reply if frame.HasField("reply") else None
