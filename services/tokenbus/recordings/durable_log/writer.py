"""LogWriter: writes items to a log, each once and in order, even with several writers."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from nats.js.api import Header
from nats.js.errors import NotFoundError

from tokenbus.bus import AddressError
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.recordings.durable_log.server import ServerConnection, end_tasks, first_of
from tokenbus.recordings.durable_log.stream import LogError, LogStream, missing_replicas, reason_of
from tokenbus.recordings.items import Recorder, StreamItem
from tokenbus.settings import Settings

_WRONG_LAST_SEQUENCE, _NO_STREAM = 10071, 10059
_RETRY_SECONDS = 0.1
_MOST_QUEUES = 4096
_ENTRY_BYTES = 64
"""Maximum overhead of an item in a message, in bytes."""
_log = logger("log")


@dataclass(slots=True)
class LogCounts:
    """Counts of written items and of failures."""

    items: int = 0
    payload_bytes: int = 0
    messages: int = 0
    already_there: int = 0
    """Number of items that another writer or an earlier run had already written to the log."""
    missing_items: int = 0
    """Number of items that this writer did not receive; the log has gaps in their place."""
    refused_items: int = 0
    """Number of items that are missing in the log because they are too large for the server."""
    failed_writes: int = 0
    """Number of messages without an ack and of requests without an answer, which the writer retries."""


@dataclass(slots=True)
class _Pending:
    item: StreamItem
    skipped: int
    """Number of skipped items directly before this item."""
    on_logged: Callable[[], None]
    queued_at: float = field(default_factory=time.monotonic)

    @property
    def size(self) -> int:
        return len(self.item.payload) + _ENTRY_BYTES


@dataclass(slots=True)
class _SubjectQueue:
    """Unwritten items of one worker incarnation, which has its own subject."""

    subject: str
    items: deque[_Pending] = field(default_factory=deque)
    last: int = 0
    """Sequence of the last item that is known to be in the log."""
    revision: int | None = None
    """Number of the subject's last message, or None if the writer must ask the server."""
    skipped: range = range(0)
    """Sequences of the latest skipped items."""
    hole_since: tuple[int, float] | None = None
    """While the writer waits for another writer's items: the value of `last`, and the time at which the wait began."""
    task: asyncio.Task[None] | None = None


class LogWriter:
    """Writes items to one log.

    Call `open`, which waits for a server and creates the stream, or `start`, which does not wait. Without a server, the
    writer buffers items, and `problem` has the reason. Call `close` at the end.

    Each worker incarnation has its own subject, with at most one message in flight. A message has consecutive items,
    and names the expected number of the subject's last message. If another writer was faster, the server refuses the
    message. This writer then reads the last message and continues after it.
    """

    def __init__(
        self,
        stream: LogStream,
        settings: Settings,
        *,
        wait_seconds: float = 0,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Create a writer, which waits `wait_seconds` for another writer's items before it writes a gap.

        The writer awaits `check` after each connect and in each heartbeat interval, and writes nothing while `check`
        raises LogError.
        """
        self.counts = LogCounts()
        self._check = check
        self._error: AddressError | None = LogError(stream.address, stream.reason)
        self._news = asyncio.Event()
        """Event that is set when the log becomes writable, and at each error."""
        self.missing_replicas = settings.durable_log.replicas
        self._stream = stream
        self._settings = settings
        self._wait_seconds = wait_seconds
        self._queues: dict[tuple[str, int], _SubjectQueue] = {}
        self.buffered_bytes = 0
        """Size of the unwritten items in bytes."""
        self._room = asyncio.Event()
        self._connected = asyncio.Event()
        self._server: ServerConnection | None = None
        self._created: datetime | None = None
        self._running: asyncio.Task[None] | None = None
        self._interval = settings.bus.heartbeat_interval_ms / 1000
        self.largest_message = 0
        """Maximum message size of the server, in bytes."""
        self._repeated_log = DeduplicatedLog()

    def start(self) -> None:
        self._running = asyncio.create_task(self._run())

    async def open(self, fatal: type[AddressError], seconds: float | None = None) -> None:
        """Connect, and wait until the log can be written.

        Raises an error of the type `fatal` at once, and any other AddressError only after `seconds`.
        """
        self.start()
        try:
            async with asyncio.timeout(seconds):
                while not self._connected.is_set():
                    await self._news.wait()
                    self._news.clear()
                    if isinstance(self._error, fatal):
                        raise self._error  # noqa: TRY301 - any error closes the writer
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                reason = f"no server answers within {seconds:g} s: {self.problem}"
                raise AddressError(self._stream.address, reason) from None
            raise

    async def close(self, drain_seconds: float = 0) -> None:
        """Write the buffered items within `drain_seconds`, and disconnect."""
        writing = {queue.task for queue in self._queues.values() if queue.task is not None}
        if writing and drain_seconds:
            await asyncio.wait(writing, timeout=drain_seconds)
        if left := self.unwritten_items:
            _log.error("items are not in the log", items=left)
        if self._running is not None:
            writing.add(self._running)
        await end_tasks(*writing)
        self._repeated_log.close()

    @property
    def unwritten_items(self) -> int:
        return sum(len(queue.items) for queue in tuple(self._queues.values()))

    @property
    def problem(self) -> str:
        """Reason why the writer cannot write now, or empty if it can."""
        return "" if self._error is None else self._error.reason

    @property
    def lag_seconds(self) -> float:
        """Age of the oldest unwritten item."""
        now = oldest = time.monotonic()
        for queue in tuple(self._queues.values()):
            with suppress(IndexError):  # the metrics thread may call this while the event loop empties the queue
                oldest = min(oldest, queue.items[0].queued_at)
        return max(0.0, now - oldest)

    @property
    def has_room(self) -> bool:
        return self.buffered_bytes < self._settings.durable_log.buffer_bytes

    async def write(self, item: StreamItem, *, stop: asyncio.Event | None = None) -> None:
        """Wait until the buffer has room or `stop` is set, and then enqueue an item."""
        stop = stop or asyncio.Event()
        while not (self.has_room or stop.is_set()):
            self._room.clear()
            await first_of(self._room, stop)
        self.enqueue(item)

    def enqueue(self, item: StreamItem, on_logged: Callable[[], None] = lambda: None) -> None:
        """Enqueue an item even into a full buffer; `on_logged` runs once the item is logged or refused for its size."""
        queue = self._queue(item)
        skipped = len(queue.skipped) if queue.skipped.stop == item.sequence else 0
        pending = _Pending(item, skipped, on_logged)
        self.buffered_bytes += pending.size
        queue.items.append(pending)
        if queue.task is None:
            queue.task = asyncio.create_task(self._write(queue))

    def skip(self, item: StreamItem) -> None:
        """Skip an item, so that the writer does not wait for another writer to write it."""
        queue = self._queue(item)
        begin = queue.skipped.start if queue.skipped.stop == item.sequence else item.sequence
        queue.skipped = range(begin, item.sequence + 1)

    def _queue(self, item: StreamItem) -> _SubjectQueue:
        key = worker_id, epoch = item.worker_id, item.epoch
        queue = self._queues.get(key)
        if queue is None:
            if len(self._queues) >= _MOST_QUEUES:  # idle queues can be dropped, because the log has their state
                self._queues = {name: each for name, each in self._queues.items() if each.task is not None}
            queue = self._queues[key] = _SubjectQueue(self._stream.subject(worker_id, epoch))
        return queue

    async def _run(self) -> None:
        """Keep a connection open, and reconnect after any failure."""
        while True:
            try:
                server = await self._stream.connect(self._interval, self._fault)
                try:
                    await self._use(server)
                finally:
                    self._connected.clear()
                    self._server = None
                    await server.close()
            except Exception as error:  # noqa: BLE001 - any error is logged and retried
                self._fault(error)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _use(self, server: ServerConnection) -> None:
        """Write to a server until the connection is lost or the stream fails a check; raises LogError."""
        info = await self._stream.info(server, make=True, tell=self._fault)
        self.largest_message = self._stream.largest_message(server, info)
        while not server.lost.is_set():
            if self._created not in {None, info.created}:  # the log was deleted or restored from a backup
                _log.error("log was made anew", log=self._stream.address, messages=info.state.messages)
                for queue in self._queues.values():  # a gap will replace the lost items
                    queue.last, queue.revision = 0, None
            self._created = info.created
            self.missing_replicas = missing_replicas(info)
            self._stream.check_quorum(info)
            if self._check is not None:
                await self._check()
            if self._server is None:
                self._server = server
                self._connected.set()
                self._recovered()
            await first_of(server.lost, seconds=self._interval)
            if not server.lost.is_set():
                info = await self._stream.look(server)
        raise LogError(self._stream.address, server.reason or "the connection was lost")

    def _fault(self, error: Exception) -> None:
        self._error = error if isinstance(error, AddressError) else LogError(self._stream.address, reason_of(error))
        self._news.set()
        reason = self._error.reason
        self._repeated_log.begin(reason, _log.warning, "not written to the log yet", reason=reason)

    def _recovered(self) -> None:
        if self._error is not None and self._connected.is_set():
            self._error = None
            self._news.set()
            self._repeated_log.close()
            _log.info("writing", log=self._stream.address)

    async def _write(self, queue: _SubjectQueue) -> None:
        while queue.items:
            await self._connected.wait()
            if (server := self._server) is None:
                continue
            try:
                if queue.revision is None:
                    await self._read_last(queue, server)
                while queue.items and queue.items[0].item.sequence <= queue.last:
                    self.counts.already_there += 1
                    self._remove_first(queue)
                if queue.items and not await self._is_waiting(queue):
                    await self._write_next(queue, server)
            except Exception as error:  # noqa: BLE001 - the items stay queued
                queue.revision = None
                if getattr(error, "err_code", 0) != _WRONG_LAST_SEQUENCE:
                    self.counts.failed_writes += 1
                    if not server.lost.is_set():  # the next connection logs why the last one was lost
                        self._fault(error)
                    await asyncio.sleep(_RETRY_SECONDS)
        queue.task = None
        self._recovered()

    async def _read_last(self, queue: _SubjectQueue, server: ServerConnection) -> None:
        """Read the last message of the queue's subject, and set the queue's `last` and `revision`."""
        try:
            message = await server.ask(server.jetstream.get_last_msg(self._stream.name, queue.subject))
        except NotFoundError as error:
            if error.err_code == _NO_STREAM:
                raise
            queue.revision = 0
            return
        queue.last = max(queue.last, await self._stream.last_sequence(server, queue.subject, message))
        queue.revision = message.seq

    async def _is_waiting(self, queue: _SubjectQueue) -> bool:
        """Pause and return True if another writer may still write the items before the first queued item."""
        first, loop = queue.items[0], asyncio.get_running_loop()
        if first.item.sequence - first.skipped <= queue.last + 1:
            queue.hole_since = None
            return False
        if queue.hole_since is None or queue.hole_since[0] != queue.last:
            queue.hole_since = queue.last, loop.time()
        if loop.time() - queue.hole_since[1] >= self._wait_seconds:
            return False
        queue.revision = None
        await asyncio.sleep(_RETRY_SECONDS)
        return True

    async def _write_next(self, queue: _SubjectQueue, server: ServerConnection) -> None:
        """Write the next consecutive items as one message."""
        first = queue.items[0].item
        recorder = Recorder(first.epoch, first.hello, first_sequence=queue.last + 1)
        most = min(self._settings.durable_log.message_bytes, self.largest_message)
        parts: list[bytes] = []
        size = 0
        for pending in queue.items:
            is_next = pending.item.sequence == recorder.last_sequence + 1
            if parts and not (is_next and size + pending.size <= most):
                break
            parts.append(recorder.add(pending.item))
            size += len(parts[-1])
        if size > self.largest_message:
            self.counts.refused_items += 1
            fields = {"stream": first.worker_id, "sequence": first.sequence}
            _log.error("item is too large for the log", **fields, bytes=size, most=self.largest_message)
            self._remove_first(queue)
            return
        headers = {
            Header.EXPECTED_STREAM.value: self._stream.name,
            Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(queue.revision),
        }
        ack = await server.ask(server.jetstream.publish(queue.subject, b"".join(parts), headers=headers))
        self._recovered()
        queue.revision = ack.seq
        queue.last = recorder.last_sequence
        self.counts.messages += 1
        self.counts.items += recorder.items
        self.counts.payload_bytes += recorder.payload_bytes
        if recorder.missing_items:
            self.counts.missing_items += recorder.missing_items
            _log.warning("items are missing", stream=first.worker_id, epoch=first.epoch, before=first.sequence)
        for _ in range(recorder.items):
            self._remove_first(queue)

    def _remove_first(self, queue: _SubjectQueue) -> None:
        pending = queue.items.popleft()
        self.buffered_bytes -= pending.size
        self._room.set()
        pending.on_logged()
