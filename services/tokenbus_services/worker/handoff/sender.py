"""HandoffSender: sends the requests of a prefill worker to their decode workers, and tells of those that none took."""

import asyncio
import contextlib
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_services.bus import ClosedError, Connection, Transport
from tokenbus_services.clock import Clock
from tokenbus_services.logs import DeduplicatedLog, logger
from tokenbus_services.settings import Settings
from tokenbus_services.worker.counts import WorkerCounts
from tokenbus_services.worker.handoff.message import handoff_of, read_reply

_log = logger("worker")
_TRIES = 4
"""How often one is sent within its time, where nobody answers."""
_FULL_WAIT = 0.005
_Where = tuple[str, bytes]
"""A decode worker's address, and its public key, empty if it asks for none: a restarted one may have another."""


@dataclass(slots=True)
class _Pending:
    """A hand-off that nobody has answered yet."""

    key: int
    parts: list[bytes]
    address: str
    server_key: bytes
    deadline: float
    next_try: float


@dataclass(slots=True)
class _Peer:
    """A connection to one decode worker."""

    connection: Connection
    receiving: "asyncio.Task[None]"


class HandoffSender:
    """Sends while `async with` lasts."""

    def __init__(
        self,
        settings: Settings,
        transport: Transport,
        clock: Clock,
        counts: WorkerCounts,
        failed: Callable[[int, str], None],
    ) -> None:
        """Take the settings of a prefill worker, where to count, and who is told of a request that none took.

        That is told in a thread of its own.
        """
        self.counts = counts
        self._settings = settings
        self._transport = transport
        self._clock = clock
        self._failed = failed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._given: deque[tuple[int, _Pending]] = deque()
        self._pending: dict[int, _Pending] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self._settled = asyncio.Event()
        self._peers: OrderedDict[_Where, _Peer] = OrderedDict()
        self._repeated_log = DeduplicatedLog()

    async def __aenter__(self) -> Self:
        """Begin to send."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until everything is answered, or its time is over, and leave."""
        while error is None and self.pending:  # each ends within its time
            self._settled.clear()
            await self._settled.wait()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.gather(*self._telling)
        for where in list(self._peers):
            await self._close(where)

    @property
    def pending(self) -> int:
        """How many hand-offs wait for their answer."""
        return len(self._given) + len(self._pending)

    def send(self, generate: Generate, state: bytes) -> None:
        """Hand a request off, from any thread; a ValueError says why it cannot be."""
        worker, bus = self._settings.worker, self._settings.bus
        if not generate.handoff_address:
            raise ValueError("no decode worker is there to go on with it")
        if len(state) > bus.max_part_bytes:
            raise ValueError(f"its state: at most {bus.max_part_bytes} bytes (bus.max_part_bytes), got {len(state)}")
        if self.pending >= worker.max_requests:
            raise ValueError(f"at most {worker.max_requests} hand-offs that nobody answered yet")
        number = secrets.randbits(63) + 1
        try:
            parts = handoff_of(generate, state, number, self._settings)
        except ContractError as error:
            raise ValueError(str(error)) from None
        now = self._clock.now()
        deadline = now + worker.handoff_timeout_ms / 1000
        key, address, server_key = generate.request_key, generate.handoff_address, generate.handoff_server_key
        self._given.append((number, _Pending(key, parts, address, server_key, deadline, now)))
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: the worker has left
                self._loop.call_soon_threadsafe(self._wake.set)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            while self._given:  # the other thread only ever adds
                number, pending = self._given[0]
                self._pending[number] = pending
                self._given.popleft()
            self.counts.handing_off = len(self._pending)
            now = self._clock.now()
            for number, pending in list(self._pending.items()):
                if number not in self._pending:  # it was answered while another was sent
                    continue
                if now >= pending.deadline:
                    waited = self._settings.worker.handoff_timeout_ms
                    self._end(number, f"the decode worker at {pending.address} did not answer for {waited} ms")
                elif now >= pending.next_try:
                    await self._try(number, pending, now)
            times = [min(pending.next_try, pending.deadline) for pending in self._pending.values()]
            # With nothing to send there is nothing to look at until something wakes it.
            await self._clock.wait(self._wake, max(0.0, min(times) - self._clock.now()) if times else 1.0)

    async def _try(self, number: int, pending: _Pending, now: float) -> None:
        try:
            peer = await self._peer((pending.address, pending.server_key))
            is_sent = peer.connection.send(pending.parts)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this one, and not all that come after it
            self._end(number, f"the decode worker at {pending.address} cannot be reached: {error}")
            return
        every = self._settings.worker.handoff_timeout_ms / 1000 / _TRIES
        pending.next_try = now + (every if is_sent else _FULL_WAIT)

    async def _peer(self, where: _Where) -> _Peer:
        peer = self._peers.get(where)
        if peer is None:
            if len(self._peers) >= self._settings.worker.handoff_connections:
                await self._close(next(iter(self._peers)))
            connection = await self._transport.connect(*where)
            peer = self._peers[where] = _Peer(connection, asyncio.create_task(self._receive(connection)))
        self._peers.move_to_end(where)
        return peer

    async def _close(self, where: _Where) -> None:
        peer = self._peers.pop(where)
        peer.receiving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await peer.receiving
        await peer.connection.close()

    async def _receive(self, connection: Connection) -> None:
        while True:
            try:
                reply = read_reply(await connection.receive())
            except ClosedError:
                return
            except ContractError as error:
                self._repeated_log.begin("reply", _log.warning, "answer to a hand-off refused", reason=str(error))
                continue
            if reply is None or reply.number not in self._pending:
                continue  # it was sent twice, and answered twice
            if reply.refusal:
                address = self._pending[reply.number].address
                self._end(reply.number, f"the decode worker at {address} refused it: {reply.refusal}")
            else:
                self.counts.handed_off += 1
                self._drop(reply.number)

    def _end(self, number: int, why: str) -> None:
        key = self._pending[number].key
        self.counts.untaken += 1
        self._repeated_log.begin("handoff", _log.error, "hand-off failed", reason=why, request=f"{key:016x}")
        # Telling may wait for room in retention; the others are not to wait for that.
        telling = asyncio.create_task(asyncio.to_thread(self._failed, key, why))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)
        self._drop(number)

    def _drop(self, number: int) -> None:
        self._pending.pop(number, None)
        self.counts.handing_off = len(self._pending)
        if not self.pending:
            self._settled.set()
