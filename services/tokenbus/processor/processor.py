"""Processor: receives worker streams and delivers tokens to clients. Core: the processor's parts, without sockets."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from tokenbus.bus import ClosedError, Listener, Transport, Usage, transport_for
from tokenbus.clock import Clock, SystemClock
from tokenbus.delivery import Step
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.processor.client_connections import ClientConnections
from tokenbus.processor.dispatch import Dispatch
from tokenbus.processor.intake import Intake
from tokenbus.processor.refused_messages import RefusedMessages
from tokenbus.processor.request_registry import RequestRegistry
from tokenbus.processor.requests import UNCLAIMED, UNROUTED
from tokenbus.processor.worker_connections import WorkerConnections
from tokenbus.processor.workers import Workers
from tokenbus.recordings.durable_log import require_nats
from tokenbus.settings import Settings, SettingsError, listed_addresses
from tokenbus_contracts.generated.stream_pb2 import GoodbyeReason

if TYPE_CHECKING:
    from tokenbus.recordings.durable_log.item_log import ItemLog

_log = logger("processor")
_CLOSING = "the processor is closing"
_TICKS = 10
"""Number of ticks in one heartbeat interval."""


class Core:
    """The parts of a processor; each part refers only to parts that were created before it."""

    def __init__(self, settings: Settings, clock: Clock, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self.repeated_log = DeduplicatedLog()
        self._failed_ticks = 0
        self._timeout = settings.bus.heartbeat_timeout_ms / 1000
        self._back_at = clock.now() + self._timeout
        self.refused_messages = RefusedMessages(self.repeated_log)
        self.workers = Workers(settings.processor)
        self.registry = RequestRegistry(settings.processor, clock, self.workers)
        self.dispatch = Dispatch(settings, self.registry, self.workers)
        self.clients = ClientConnections(settings, self.dispatch, self.refused_messages, clock.now, call_soon)
        self.intake = Intake(settings, self.dispatch, self.clients, self.refused_messages, clock.now)
        self.worker_connections = WorkerConnections(settings, self.workers, self.intake, self.refused_messages)

    @property
    def failed_ticks(self) -> int:
        """Number of ticks that failed because of a defect in the processor."""
        parts = self.registry.failed_ticks, self.worker_connections.failed_ticks, self.clients.failed_ticks
        return self._failed_ticks + sum(parts)

    def listen(self, workers: Listener, clients: Listener) -> None:
        self.workers.listener, self.clients.peers.listener = workers, clients

    def begin(self, now: float) -> None:
        """Begin the period in which workers may reconnect after a restart."""
        self._back_at = now + self._timeout
        self.dispatch.expect_workers(now)

    def extend_deadlines(self, seconds: float, now: float) -> None:
        self._back_at = min(now + self._timeout, self._back_at + seconds)
        for part in (self.dispatch, self.worker_connections, self.clients):
            part.extend_deadlines(seconds, now)

    def drain(self) -> None:
        """Refuse new requests and workers, and end requests that clients can continue at other processors."""
        self.worker_connections.is_draining = self.clients.is_draining = True
        self.registry.end_continuable(_CLOSING)
        self._send_workers_away()

    def _send_workers_away(self) -> None:
        if self.worker_connections.is_draining:
            self.worker_connections.send_away(self.workers.by_id.values(), _CLOSING)

    def tick(self, now: float) -> None:
        parts: tuple[Callable[[], object], ...] = (
            self.registry.expire,
            self._send_workers_away,
            lambda: self.worker_connections.send_away(self.dispatch.without_decoder(now), "no decode worker is here"),
            self.dispatch.relieve_draining,
            lambda: self.dispatch.tick(now),
            lambda: self.worker_connections.tick(now),
            lambda: self.clients.tick(now),
            lambda: self.clients.resumes.tick(are_back=now >= self._back_at),
        )
        for part in parts:
            try:
                part()
            except Exception:  # noqa: BLE001 - only a defect of the processor raises here
                self._failed_ticks += 1
                self.repeated_log.begin("defect", _log.exception, "tick failed")
        self.repeated_log.expire()

    def close(self) -> None:
        for connections in (self.clients, self.worker_connections):
            connections.close(GoodbyeReason.GOODBYE_REASON_RESTARTING, _CLOSING)
        self.repeated_log.close()


class Processor:
    """Listens at one address for workers and at another address for clients while `async with` lasts.

    Clients send requests and read the tokens. In this process, `steps()` yields all steps as columns.
    Example:
        async with tokenbus.Processor() as processor:
            print(processor.workers_address, processor.clients_address)
    """

    def __init__(
        self, settings: Settings | None = None, *, transport: Transport | None = None, clock: Clock | None = None
    ) -> None:
        self.settings = _named(settings or Settings.load())
        for key in ("workers_address", "clients_address"):
            address = getattr(self.settings.bus, key)
            if len(listed_addresses(address)) > 1:
                raise SettingsError(f"bus.{key}", "one address, at which the processor listens", address)
        self.id = self.settings.processor.id
        self.clock = clock or SystemClock()
        self._core = core = Core(self.settings, self.clock, lambda call: asyncio.get_running_loop().call_soon(call))
        self.refused_messages, self.registry, self.intake = core.refused_messages, core.registry, core.intake
        self.workers, self.dispatch, self.clients = core.workers, core.dispatch, core.clients
        self.worker_connections = core.worker_connections
        self._transport = transport
        self._listeners: list[Listener] = []
        self._opened = AsyncExitStack()
        self.item_log: ItemLog | None = None
        """The durable log, or None unless `durable_log.address` is set."""
        self.waits_for_log = False
        """Whether listening is delayed because the durable log cannot be written yet."""
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        self.refused_connections = 0
        self.unreachable: tuple[str, ...] = ()
        """Addresses of this processor that new connections cannot reach."""

    async def __aenter__(self) -> Self:
        bus = replace(self.settings.bus, max_connections=self.settings.most_connections)
        transport = self._transport or transport_for(bus, bus.workers_address)
        async with AsyncExitStack() as opened:
            await self._open_log(opened)
            listeners = []
            for address in (bus.workers_address, bus.clients_address):
                listeners.append(await transport.listen(address, self._transport_refused))
                opened.push_async_callback(listeners[-1].close)
            self._opened = opened.pop_all()
        self._listeners = workers, clients = listeners
        self._core.listen(workers, clients)
        workers.budget.before_pause = self._send_gathered
        self._core.begin(self.clock.now())
        self._tasks = [
            asyncio.create_task(self._carry(workers, self._receive_from_worker)),
            asyncio.create_task(self._carry(clients, self.clients.receive)),
            asyncio.create_task(self._tick()),
        ]
        _log.info("listening", processor=self.id, workers=self.workers_address, clients=self.clients_address)
        return self

    async def __aexit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            await self.drain()
        await self._close()

    async def drain(self) -> None:
        """Refuse new requests and workers, and wait up to `drain_timeout_ms` until the open requests have ended.

        Idle workers with another processor in their list move there. Clients with another processor continue their
        requests there.
        """
        self._core.drain()
        deadline = self.clock.now() + self.settings.processor.drain_timeout_ms / 1000
        while self._has_work() and (remaining := deadline - self.clock.now()) > 0:
            self._changed.clear()
            await self.clock.wait(self._changed, min(remaining, self._tick_seconds))

    def _has_work(self) -> bool:
        waiting = any(len(session.send_queue) and session.peer for session in self.clients.sessions.values())
        return waiting or any(request.is_claimed for request in self.registry.table.open_requests())

    async def _close(self) -> None:
        self._core.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.intake.step_queue is not None:
            self.intake.step_queue.put_nowait(None)  # the consumer still gets the queued steps before this end marker
        await self._opened.aclose()
        _log.info("closed", processor=self.id)

    async def _open_log(self, opened: AsyncExitStack) -> None:
        """Open the durable log if one is configured; raises AddressError if the address can never work."""
        if self.settings.durable_log.address:
            require_nats(self.settings.durable_log.address)
            from tokenbus.recordings.durable_log.item_log import ItemLog  # noqa: PLC0415 - needs an extra

            self.item_log = ItemLog(self.settings)
            self.waits_for_log = True
            try:
                await self.item_log.open()
            finally:
                self.waits_for_log = False
            opened.push_async_callback(self.item_log.close)
            self.intake.log_item = self.item_log.take

    @property
    def is_listening(self) -> bool:
        """Whether the processor listens and all of its tasks run."""
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    @property
    def failed_ticks(self) -> int:
        """How often the tick of a worker, a client or a request has failed because of a defect."""
        return self._core.failed_ticks

    @property
    def workers_address(self) -> str:
        """Address for workers, with the actual port."""
        return self._listeners[0].address if self._listeners else self.settings.bus.workers_address

    @property
    def clients_address(self) -> str:
        """Address for clients, with the actual port."""
        return self._listeners[1].address if self._listeners else self.settings.bus.clients_address

    async def _carry(self, listener: Listener, receive: Callable[[bytes, list[bytes], float], None]) -> None:
        while True:
            try:
                peer, parts = await listener.receive()
            except ClosedError:
                return
            try:
                receive(peer, parts, self.clock.now())
            except Exception:  # noqa: BLE001 - a defect affects one message, and not the process
                self._core.repeated_log.begin("internal", _log.exception, "a message could not be handled")

    def _receive_from_worker(self, peer: bytes, parts: list[bytes], now: float) -> None:
        self.clients.gather(now)  # frames are gathered until the listener calls `before_pause`
        self.worker_connections.receive(peer, parts, now)

    def _send_gathered(self) -> None:
        try:
            self.clients.send_gathered()
        except Exception:  # noqa: BLE001 - only a defect of the processor raises here
            self._core.repeated_log.begin("internal", _log.exception, "frames could not be sent")

    async def _tick(self) -> None:
        looked = self.clock.now()
        while True:
            await self.clock.wait(self._stopping, self._tick_seconds)
            now = self.clock.now()
            stood_still = now - looked - self.settings.bus.heartbeat_interval_ms / 1000
            if stood_still > 0:
                self._core.extend_deadlines(stood_still, now)
            looked = now
            self._look_for_addresses()
            self._core.tick(now)
            self._changed.set()

    def _look_for_addresses(self) -> None:
        self.unreachable = tuple(each.address for each in self._listeners if not each.is_reachable())
        for address in self.unreachable:
            self._core.repeated_log.begin(
                ("address", address), _log.warning, "address gone: nothing new can connect", address=address
            )

    def usage(self) -> Usage:
        """Return how much of the transport's limits all peers together use."""
        return self._listeners[0].usage() if self._listeners else Usage()

    @property
    def _tick_seconds(self) -> float:
        return self.settings.bus.heartbeat_interval_ms / 1000 / _TICKS

    def _transport_refused(self, reason: str) -> None:
        self.refused_connections += 1
        self._core.repeated_log.begin("transport", _log.warning, "connection refused", reason=reason)

    def steps(self) -> AsyncGenerator[Step, None]:
        """Return an iterator over all steps from now on, in original batch order; only one iterator may exist.

        A step is acknowledged when the consumer requests the next one, so workers wait for a slow consumer. After a
        restart, unacknowledged steps arrive again with the same stream and sequence. Until the iterator is closed, rows
        of unclaimed requests are delivered only to its consumer.
        """
        if self.intake.step_queue is not None:
            raise RuntimeError("steps() is already being iterated over: one consumer takes all steps")
        self.intake.step_queue = asyncio.Queue()
        self.registry.default_route = UNROUTED
        return self._steps(self.intake.step_queue)

    async def _steps(self, queue: "asyncio.Queue[Step | None]") -> AsyncGenerator[Step, None]:
        try:
            while (step := await queue.get()) is not None:
                try:
                    yield step
                finally:
                    step.pending_ack.release()
        finally:
            while not queue.empty():
                if (step := queue.get_nowait()) is not None:
                    step.pending_ack.release()
            self.intake.step_queue = None
            self.registry.default_route = UNCLAIMED


def _named(settings: Settings) -> Settings:
    """Add a random suffix to the processor's id, so that clients notice a restart.

    Otherwise, the request of a client that missed the restart could be computed twice.
    """
    name = f"{settings.processor.id}-{secrets.token_hex(4)}"
    return replace(settings, processor=replace(settings.processor, id=name))
