"""Replay: publishes the items of a recording to a processor, as the worker that published them first."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from tokenbus_contracts import ContractError, Limits, LogprobBatch, encode
from tokenbus_contracts.frames import write_frame
from tokenbus_services.bus import Transport, transport_for
from tokenbus_services.clock import Clock, SystemClock
from tokenbus_services.delivery.step import LEAVES
from tokenbus_services.items import StreamItem, public_hello
from tokenbus_services.link import Link, SessionState
from tokenbus_services.processor_list import processors_at
from tokenbus_services.settings import Settings
from tokenbus_services.worker.retention import Retention
from tokenbus_services.worker.session import WorkerSession

_LIMITS = Limits.schema()
_NS = 1_000_000_000
_TURN = 16
"""After how many items the event loop runs others, if nothing else lets it."""


class ReplayError(RuntimeError):
    """A recording could not be published: the processor refused it, or none answered."""


class _Contents(NamedTuple):
    """When an item was produced, the requests that have rows or events in it, and those of them that it ends."""

    produced_at_ns: int
    """0: unknown."""
    present: Iterable[int]
    ended: Iterable[int]


_NOTHING = _Contents(0, (), ())


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
        items: Iterator[StreamItem],
        settings: Settings,
        *,
        renamed_to: tuple[str, int] | None = None,
        speed: float = 1,
        transport: Transport | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Create a replay of some items, under another worker id and epoch if given; `speed` 0 is without pauses.

        Retention is bounded as a worker's is. Raises ReplayError if there is no item. Errors of the iterator `items`
        are raised here or by `run`.
        """
        if (begin := next(items, None)) is None:
            raise ReplayError("nothing to replay: the recording has no item")
        self._items = chain([begin], items)
        self._renamed_to = renamed_to
        worker_id, epoch = renamed_to or (begin.worker_id, begin.epoch)
        self.done = Replayed(worker_id, epoch)
        self._settings = settings
        self._clock = clock or SystemClock()
        self._transport = transport
        worker, bus = settings.worker, settings.bus
        self._retention = Retention(worker.retention_items, worker.retention_bytes, checksum=worker.checksum)
        self._retention.next_sequence = begin.sequence - begin.missing_items
        self._processors = processors_at(bus.workers_address, bus, worker_id=worker_id)
        hello = public_hello(begin.hello)  # the session draws secrets of its own
        hello.worker_id = worker_id
        hello.max_requests = 0
        self._session = WorkerSession(
            hello,
            epoch,
            self._retention,
            interval=bus.heartbeat_interval_ms / 1000,
            timeout=bus.heartbeat_timeout_ms / 1000,
            on_request=lambda _: None,  # a recording answers no request
            on_room=lambda: None,
            processors=self._processors.count,
            may_move=not self._processors.is_fixed,
        )
        self._link = Link(self._session, contextlib.nullcontext(), self._clock, "replay")
        self._speed = speed
        self._begin: tuple[int, float] | None = None
        """When the first item was produced, and when it was published."""
        self._running: asyncio.Task[None] | None = None
        self._is_stopped = False

    async def run(self, stop: asyncio.Event, shown: Callable[[], None] = lambda: None) -> Replayed:
        """Publish all items, or as many as there is time for until `stop` is set, and wait for their acks.

        `shown` is called after each item. Raises ReplayError if the processor refuses the worker, or if there is no
        answer, room or last ack for `worker.block_timeout_ms`.
        """
        transport = self._transport or transport_for(self._settings.bus)
        running = await self._link.start(transport, self._processors)
        running.add_done_callback(lambda _: self._link.progress.set())
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
        self._link.progress.set()

    async def _publish_all(self, shown: Callable[[], None]) -> None:
        patience = self._settings.worker.block_timeout_ms / 1000
        if not await self._until(lambda: self._session.state is SessionState.OPEN, patience):
            raise ReplayError(f"no processor answered for {self._settings.worker.block_timeout_ms} ms")
        for item in self._items:
            contents = _contents_of(item)
            await self._until(lambda: False, self._seconds_early(contents.produced_at_ns))
            if not await self._until(lambda: self._retention.has_room(len(item.payload)), patience):  # noqa: B023 - now
                raise ReplayError(
                    f"retention: no room for {self._settings.worker.block_timeout_ms} ms: "
                    f"{len(self._retention)} items wait for the processor to acknowledge them"
                )
            if self._is_stopped:
                return
            self._publish(item, contents)
            shown()
            if not self.done.items % _TURN:
                await asyncio.sleep(0)
        # The processor acknowledges what no client takes when its time is over.
        await self._until(lambda: not self._session.outstanding, patience)

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until a condition holds or the replay is stopped, for at most so many seconds; return whether."""
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
            self._link.progress.clear()
            await self._clock.wait(self._link.progress, remaining)

    def _seconds_early(self, produced_at_ns: int) -> float:
        """Return after how many seconds an item is due, measured from the first; one without a time is due at once."""
        if not self._speed or not produced_at_ns:
            return 0
        now = self._clock.now()
        if self._begin is None:
            self._begin = produced_at_ns, now
        first_ns, began = self._begin
        return began + (produced_at_ns - first_ns) / _NS / self._speed - now

    def _publish(self, item: StreamItem, contents: _Contents) -> None:
        if item.missing_items:
            self._retention.skip_to(item.sequence)
            self.done.missing_items += item.missing_items
        payload = item.payload if self._renamed_to is None else _renamed(item, *self._renamed_to)
        self._retention.keep(item.kind, payload)
        self.done.items += 1
        self.done.payload_bytes += len(payload)
        # The hello to a processor that comes back names the open requests.
        self._session.requests.update(contents.present)
        self._session.requests.difference_update(contents.ended)
        self._link.wake()


def _contents_of(item: StreamItem) -> _Contents:
    """Return the contents of an item; empty for a payload that the processor will refuse."""
    with contextlib.suppress(ContractError):
        if item.batch is not None:
            ids, leaving = item.batch.request_keys, LEAVES[item.batch.statuses]
            return _Contents(item.batch.header.produced_at_ns, ids.tolist(), ids[leaving].tolist())
        if item.event is not None and item.event.HasField("admitted"):
            return _NOTHING._replace(present=[item.event.admitted.request_key])
        if item.event is not None and item.event.HasField("error"):
            return _NOTHING._replace(ended=[item.event.error.request_key])
    return _NOTHING


def _renamed(item: StreamItem, worker_id: str, epoch: int) -> bytes:
    """Return an item's payload as another worker would have published it; raises ReplayError if it is invalid."""
    try:
        if item.batch is not None:
            header = item.batch.header._replace(worker_id=worker_id, epoch=epoch)
            return encode(LogprobBatch.of_views(header, item.batch.columns), _LIMITS)
        if item.event is not None and item.event.WhichOneof("event") == "admitted":
            item.event.admitted.worker_id, item.event.admitted.epoch = worker_id, epoch
            return write_frame(item.event)
    except ContractError as error:
        raise ReplayError(f"item {item.sequence}: {error}") from None
    return item.payload
