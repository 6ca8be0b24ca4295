"""A client's connection to each of its processors."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial

from tokenbus.bus import Transport
from tokenbus.bus.link import Link
from tokenbus.bus.processor_list import ProcessorList
from tokenbus.client.requests import OpenRequests
from tokenbus.client.session import ClientSession
from tokenbus.clock import Clock
from tokenbus.logs import logger
from tokenbus_contracts.generated.client_pb2 import ProcessorStatus, WorkerStatus

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
        self, addresses: Sequence[str], begin: Callable[[], ClientSession], requests: OpenRequests, clock: Clock
    ) -> None:
        self.sessions = requests.sessions
        """The state of each connection, in the order of the addresses."""
        self._requests = requests
        self._links: dict[str, tuple[ClientSession, Link]] = {}
        self._running: list[asyncio.Task[None]] = []
        """What carries the messages of each."""
        self.progress = asyncio.Event()
        for address in addresses:
            session = begin()
            link = Link(session, contextlib.nullcontext(), clock, "client")
            # Whichever brings a request's end, all of them wait for it at the end.
            link.progress, session.on_news = self.progress, link.wake
            self._links[address] = session, link

    @property
    def is_running(self) -> bool:
        """Whether the tasks that carry messages run."""
        return bool(self._running) and not any(task.done() for task in self._running)

    def wake(self) -> None:
        """Say to each processor what there is to say."""
        for _, link in self._links.values():
            link.wake()

    async def open(self, transport: Transport) -> None:
        """Connect; raises AddressError."""
        try:
            for address, (session, link) in self._links.items():
                running = await link.start(transport, ProcessorList([address]))
                running.add_done_callback(partial(self._ended, session))
                self._running.append(running)
        except BaseException:
            await self.close(0)
            raise

    def _ended(self, session: ClientSession, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("connection failed", processor=session.processor_id, exc_info=error)
            self._requests.lost(session)
        # However the connections ended: nothing more comes, and every request must have an end.
        if all(task.done() for task in self._running):
            self._requests.give_up("the client was closed")

    async def close(self, drain_seconds: float) -> None:
        """Wait for the open requests for at most so many seconds, and say goodbye; raises what ended a connection."""
        for _, link in self._links.values():
            link.stop(drain_seconds)
        try:
            outcomes = await asyncio.gather(*self._running, return_exceptions=True)
        finally:
            self._requests.give_up("the client was closed")
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):  # not one that was cancelled
                raise outcome


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
