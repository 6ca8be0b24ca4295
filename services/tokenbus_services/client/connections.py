"""A client's connection to each of its processors, which come and go where they announce themselves."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial

from tokenbus_contracts.generated.client_pb2 import ProcessorStatus, WorkerStatus
from tokenbus_services.bus import Transport
from tokenbus_services.client.requests import OpenRequests
from tokenbus_services.client.session import ClientSession
from tokenbus_services.clock import Clock
from tokenbus_services.link import Link, SessionState
from tokenbus_services.logs import logger
from tokenbus_services.processor_list import ProcessorList

_log = logger("client")
_SUMS = (
    "open_requests",
    "finished_requests",
    "failed_requests",
    "refused_requests",
    "steps",
    "tokens",
    "lost_items",
    "gaps",
)


class ProcessorConnections:
    """One connection for each processor of a list, all for the same requests."""

    def __init__(
        self, processors: ProcessorList, begin: Callable[[], ClientSession], requests: OpenRequests, clock: Clock
    ) -> None:
        self.sessions = requests.sessions
        """The state of each connection; of a fixed list in its order."""
        self._processors = processors
        self._begin = begin
        self._requests = requests
        self._clock = clock
        self._transport: Transport
        self._links: dict[str, tuple[ClientSession, Link]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        """What carries the messages of each."""
        self._leaving: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None
        self._gone_since: dict[str, float] = {}
        """Since when a processor neither announces itself nor is heard."""
        self.progress, self._changed = asyncio.Event(), asyncio.Event()
        self.known = asyncio.Event()
        """Set while there is a processor to talk to."""
        self._closes_at: float | None = None
        for address in processors.workers:
            self._add(address)

    def _add(self, address: str) -> tuple[ClientSession, Link]:
        session = self._begin()
        link = Link(session, contextlib.nullcontext(), self._clock, "client")
        # Whichever brings a request's end, all of them wait for it at the end.
        link.progress, session.on_news = self.progress, link.wake
        self._links[address] = session, link
        self.known.set()
        return session, link

    @property
    def is_running(self) -> bool:
        """Whether the tasks that carry messages run."""
        tasks = [*self._running.values(), *([self._following] if self._following is not None else [])]
        return bool(tasks) and not any(task.done() for task in tasks)

    def wake(self) -> None:
        """Say to each processor what there is to say."""
        for _, link in self._links.values():
            link.wake()

    async def open(self, transport: Transport, interval: float, patience: float) -> None:
        """Connect; raises AddressError. What comes and goes is looked for at least once an interval, in seconds.

        One that has gone is kept for its `patience`: it may stand still, and has then what was on its way from there.
        """
        self._transport = transport
        try:
            await self._processors.open(self._changed.set)
            for address, (session, link) in self._links.items():
                await self._start(address, session, link)
        except BaseException:
            await self.close(0)
            raise
        if not self._processors.is_fixed:
            self._following = asyncio.create_task(self._follow(interval, patience))

    async def _start(self, address: str, session: ClientSession, link: Link) -> None:
        self._running[address] = running = await link.start(self._transport, ProcessorList(address))
        running.add_done_callback(partial(self._ended, session))

    def _ended(self, session: ClientSession, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("connection failed", processor=session.processor_id, exc_info=error)
            self._requests.lost(session)
        # However the connections ended: nothing more comes, and every request must have an end.
        if self._processors.is_fixed and all(task.done() for task in self._running.values()):
            self._requests.give_up("the client was closed")

    async def _follow(self, interval: float, patience: float) -> None:
        while True:
            await self._clock.wait(self._changed, interval)
            self._changed.clear()
            for address in set(self._processors.workers) - self._links.keys():
                session, link = self._add(address)
                await self._start(address, session, link)
                if self._closes_at is not None:
                    link.stop(max(0.0, self._closes_at - self._clock.now()))
            now, known = self._clock.now(), set(self._processors.workers)
            for address, (session, _) in tuple(self._links.items()):
                session.has_gone = address not in known and session.state is not SessionState.OPEN
                if not session.has_gone:
                    self._gone_since.pop(address, None)
                elif now - self._gone_since.setdefault(address, now) >= patience:
                    self._remove(address)

    def _remove(self, address: str) -> None:
        session, _ = self._links.pop(address)
        if not self._links:
            self.known.clear()
        del self._gone_since[address]
        self._requests.forget(session)
        running = self._running.pop(address)
        running.cancel()
        self._leaving.add(running)
        running.add_done_callback(self._leaving.discard)

    async def close(self, drain_seconds: float) -> None:
        """Wait for the open requests for at most so many seconds, and say goodbye; raises what ended a connection."""
        self._closes_at = self._clock.now() + drain_seconds
        for _, link in self._links.values():
            link.stop(drain_seconds)
        ended: set[asyncio.Task[None]] = set()
        failures: list[Exception] = []
        try:
            while left := set(self._running.values()) - ended:  # others may come meanwhile
                outcomes = await asyncio.gather(*left, return_exceptions=True)
                failures += [each for each in outcomes if isinstance(each, Exception)]  # not those that were cancelled
                ended |= left
        finally:
            self._requests.give_up("the client was closed")
            running = [*self._running.values(), *([self._following] if self._following is not None else [])]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, *self._leaving, return_exceptions=True)
            await self._processors.close()
        if failures:
            raise failures[0]


def merged(statuses: Sequence[ProcessorStatus]) -> ProcessorStatus:
    """Return the sums of processors' statuses, and all workers; one that moved is where it is connected."""
    if len(statuses) == 1:
        return statuses[0]
    told: list[WorkerStatus] = sorted(
        (worker for status in statuses for worker in status.workers), key=lambda worker: not worker.is_connected
    )
    workers: dict[str, WorkerStatus] = {}
    for worker in told:
        workers.setdefault(worker.worker_id, worker)
    return ProcessorStatus(
        **{name: sum(getattr(status, name) for status in statuses) for name in _SUMS},
        connected_clients=max(status.connected_clients for status in statuses),
        workers=workers.values(),
    )
