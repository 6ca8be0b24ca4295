"""Replay: publishes the items of a recording to a processor, as the worker that published them once did."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tokenbus_contracts.generated.stream_pb2 import Gap, Hello, WorkerFrame
from tokenbus_services.bus import Transport, transport_for
from tokenbus_services.clock import Clock, SystemClock
from tokenbus_services.link import Link, SessionState
from tokenbus_services.recording import Entry
from tokenbus_services.settings import Settings
from tokenbus_services.worker.recorded import Contents, contents_of, renamed
from tokenbus_services.worker.retention import Dropped, Retention
from tokenbus_services.worker.session import WorkerSession

_NS = 1_000_000_000
_TURN = 16
"""After how many items the event loop has a turn, when nothing else gives it one."""


class ReplayError(RuntimeError):
    """A recording could not be published: the processor does not take it, or there is none."""


@dataclass(slots=True)
class Replayed:
    """What was published so far."""

    worker_id: str
    epoch: int
    items: int = 0
    payload_bytes: int = 0
    missing_items: int = 0
    unacknowledged: int = 0


class Replay:
    """Publishes one recording, on the current event loop."""

    def __init__(  # noqa: PLR0913 - each is given by name
        self,
        entries: Iterator[Entry],
        settings: Settings,
        *,
        renamed_to: tuple[str, int] | None = None,
        speed: float = 1,
        transport: Transport | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Take the recording, perhaps another worker and epoch to publish it as, and how many times as fast.

        At speed 0 items follow each other at once.
        Items wait in a retention that is bounded as a worker's is. A recording that cannot be read is a RecordingError,
        here or while it runs.
        """
        self._entries = entries
        begin = next(entries).frame
        self._renamed_to = renamed_to
        worker_id, epoch = renamed_to or (begin.hello.worker_id, begin.epoch)
        self.done = Replayed(worker_id, epoch)
        self._settings = settings
        self._clock = clock or SystemClock()
        self._transport = transport
        worker, bus = settings.worker, settings.bus
        self._retention = _Retention(worker.retention_items, worker.retention_bytes, checksum=worker.checksum)
        self._retention.next_sequence = begin.hello.next_sequence
        self._changed = asyncio.Event()
        self._session = _Session(
            _hello(begin, worker_id),
            epoch,
            self._retention,
            interval=bus.heartbeat_interval_ms / 1000,
            timeout=bus.heartbeat_timeout_ms / 1000,
        )
        self._session.on_change = self._changed.set
        self._link = Link(self._session, contextlib.nullcontext(), self._clock, "replay")
        self._pace = _Pace(speed) if speed else None
        self._running: asyncio.Task[None] | None = None
        self._is_stopped = False

    async def run(self, stop: asyncio.Event, shown: Callable[[], None] = lambda: None) -> Replayed:
        """Publish everything, or as much as there is time for until told to stop, and wait for the acknowledgements.

        `shown` is called after each item. What the processor refuses, or no processor takes for
        `worker.block_timeout_ms`, is a ReplayError; so long it waits for the last acknowledgements too.
        """
        transport = self._transport or transport_for(self._settings.bus)
        address = self._settings.bus.workers_address
        running = asyncio.create_task(self._link.run(transport, address, lambda: None))
        running.add_done_callback(lambda _: self._changed.set())
        stopping = asyncio.create_task(self._forward(stop))
        self._running = running
        drain_seconds = 0.0
        try:
            await self._publish_all(shown)
            drain_seconds = self._settings.worker.drain_timeout_ms / 1000
        finally:
            self._link.stop(drain_seconds)
            stopping.cancel()
            await asyncio.wait([running])
        running.result()
        self.done.unacknowledged = self._session.outstanding
        return self.done

    async def _forward(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._is_stopped = True
        self._changed.set()

    async def _publish_all(self, shown: Callable[[], None]) -> None:
        patience = self._settings.worker.block_timeout_ms / 1000
        if not await self._until(lambda: self._session.state is SessionState.OPEN, patience):
            raise ReplayError(f"no processor answered for {self._settings.worker.block_timeout_ms} ms")
        for entry in self._entries:
            contents = contents_of(entry)
            await self._until(lambda: False, self._seconds_early(contents))
            if not await self._until(lambda: self._retention.has_room(len(entry.payload)), patience):  # noqa: B023 - now
                raise ReplayError(
                    f"retention: no room for {self._settings.worker.block_timeout_ms} ms: "
                    f"{len(self._retention)} items wait for the processor to acknowledge them"
                )
            if self._is_stopped:
                return
            self._publish(entry, contents)
            shown()
            if not self.done.items % _TURN:
                await asyncio.sleep(0)
        # What nobody takes, the processor acknowledges when nobody came for it in time.
        await self._until(lambda: not self._session.outstanding, patience)

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until a condition holds, at most so many seconds, or until there is a reason to go no further."""
        deadline = self._clock.now() + seconds
        while True:
            if self._running is not None and self._running.done():
                self._running.result()
            if self._session.state is SessionState.REFUSED and self._session.refusal is not None:
                raise ReplayError(f"refused by the processor: {self._session.refusal.message}")
            if condition() or self._is_stopped:
                return True
            remaining = deadline - self._clock.now()
            if remaining <= 0:
                return False
            self._changed.clear()
            await self._clock.wait(self._changed, remaining)

    def _seconds_early(self, contents: Contents) -> float:
        if self._pace is None:
            return 0
        return self._pace.seconds_early(contents.produced_at_ns, self._clock.now())

    def _publish(self, entry: Entry, contents: Contents) -> None:
        if entry.frame.WhichOneof("body") == "gap":
            gap = entry.frame.gap
            self._retention.skip(gap)
            self.done.missing_items += gap.last_sequence - gap.first_sequence + 1
        else:
            payload = entry.payload if self._renamed_to is None else renamed(entry, *self._renamed_to)
            self._retention.keep(entry.frame.item.payload_kind, payload)
            self.done.items += 1
            self.done.payload_bytes += len(payload)
        # A processor that comes back asks which requests are open.
        self._session.requests.update(contents.present)
        self._session.requests.difference_update(contents.ended)
        self._link.wake()


class _Retention(Retention):
    """A worker's retention that can also hold a gap of any size as one entry."""

    def skip(self, gap: Gap) -> None:
        """Keep a gap in the place of its items."""
        self._kept.append(Dropped(gap.first_sequence, gap.last_sequence, frozenset(gap.request_keys)))
        self.next_sequence = gap.last_sequence + 1


class _Session(WorkerSession):
    """A worker's session that tells when anything came."""

    on_change: Callable[[], None]

    def receive(self, parts: list[bytes], now: float) -> None:
        """Take one transport message."""
        super().receive(parts, now)
        self.on_change()


class _Pace:
    """How early an item is, measured from the first."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._begin: tuple[int, float] | None = None

    def seconds_early(self, produced_at_ns: int, now: float) -> float:
        """Return after how many seconds an item is due; one without a time is due at once."""
        if not produced_at_ns:
            return 0
        if self._begin is None:
            self._begin = produced_at_ns, now
        first_ns, begun = self._begin
        return begun + (produced_at_ns - first_ns) / _NS / self._speed - now


def _hello(begin: WorkerFrame, worker_id: str) -> Hello:
    hello = Hello()
    hello.CopyFrom(begin.hello)
    hello.worker_id = worker_id
    hello.max_requests = 0  # a recording answers no new request
    for name in ("proof", "handoff_ticket", "handoff_server_key", "request_keys"):  # the replay's own, or none
        hello.ClearField(name)
    return hello
