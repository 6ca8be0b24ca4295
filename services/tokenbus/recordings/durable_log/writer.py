"""LogWriter: writes workers' items into a log, each once and in order, however many writers there are."""

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
_MOST_LANES = 4096
_ENTRY_BYTES = 64
"""The most that an item has in a message beside its payload."""
_log = logger("log")


@dataclass(slots=True)
class LogCounts:
    """What was written so far."""

    items: int = 0
    payload_bytes: int = 0
    messages: int = 0
    already_there: int = 0
    """Items that the log had already, from another writer or an earlier life of this one."""
    missing_items: int = 0
    """Items that this writer lacked, and that the log names as missing."""
    refused_items: int = 0
    """Items that are too large for the server; they are missing as well."""
    failed_writes: int = 0
    """How often the server did not acknowledge a message or answer a question; the writer repeats it."""


@dataclass(slots=True)
class _Waiting:
    item: StreamItem
    left_out: int
    """How many items directly before it this writer has left out."""
    logged: Callable[[], None]
    taken_at: float = field(default_factory=time.monotonic)

    @property
    def size(self) -> int:
        return len(self.item.payload) + _ENTRY_BYTES


@dataclass(slots=True)
class _Lane:
    """The items of one life of a worker that wait to be written."""

    subject: str
    items: deque[_Waiting] = field(default_factory=deque)
    last: int = 0
    """The sequence of the last item that is known to be in the log."""
    revision: int | None = None
    """The number of the last message of the subject; None: the writer must ask for it."""
    left_out: range = range(0)
    """The latest run of items that were left out."""
    hole_since: tuple[int, float] | None = None
    """`last` when the writer began to wait for items that another writer may have, and the time of that."""
    task: asyncio.Task[None] | None = None


class LogWriter:
    """Writes items to one log.

    `open` waits for a server and makes the stream. `start` does not wait: the writer connects when a server is there,
    and holds the items that it takes until then; `problem` says why it does not write. Then `close` it.

    Each life of a worker has a subject. Each message carries a run of its items, and the number of the message that
    must be the last one of the subject: if another writer has written since, the server refuses the message, and this
    writer reads the last one and goes on behind it. Each subject has one message in flight; items that come meanwhile
    go into the next message.
    """

    def __init__(
        self,
        stream: LogStream,
        settings: Settings,
        *,
        wait_seconds: float = 0,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Create a writer, which waits `wait_seconds` for another one to write items that it lacks, then names a gap.

        It awaits `check` after it connects, before it writes, and then each heartbeat's interval; while `check` raises
        a LogError it does not write.
        """
        self.counts = LogCounts()
        self._check = check
        self._error: AddressError | None = LogError(stream.address, stream.reason)
        self._news = asyncio.Event()
        """Set when the log can be written, and with each error."""
        self.missing_replicas = settings.durable_log.replicas
        """How many of the stream's replicas were away by the last answer."""
        self._stream = stream
        self._settings = settings
        self._wait_seconds = wait_seconds
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._buffered = 0
        self._room = asyncio.Event()
        self._connected = asyncio.Event()
        self._server: ServerConnection | None = None
        self._created: datetime | None = None
        """When the stream of the log was made."""
        self._running: asyncio.Task[None] | None = None
        self._interval = settings.bus.heartbeat_interval_ms / 1000
        self.largest_message = 0
        """The most bytes that the server takes in a message."""
        self._repeated_log = DeduplicatedLog()

    def start(self) -> None:
        """Begin to connect, without waiting; `close` ends the writer."""
        self._running = asyncio.create_task(self._run())

    async def open(self, fatal: type[AddressError], seconds: float | None = None) -> None:
        """Connect, and wait until the log can be written; an error of a kind other than `fatal` is waited out.

        Raises the fatal error, or an AddressError after so many seconds.
        """
        self.start()
        try:
            async with asyncio.timeout(seconds):
                while not self._connected.is_set():
                    await self._news.wait()
                    self._news.clear()
                    if isinstance(self._error, fatal):
                        raise self._error  # noqa: TRY301 - it closes the writer, as any other error does
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                reason = f"no server answers within {seconds:g} s: {self.problem}"
                raise AddressError(self._stream.address, reason) from None
            raise

    async def close(self, drain_seconds: float = 0) -> None:
        """Write the waiting items, for at most so many seconds, and disconnect."""
        writing = {lane.task for lane in self._lanes.values() if lane.task is not None}
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
        """How many items wait to be written."""
        return sum(len(lane.items) for lane in tuple(self._lanes.values()))

    @property
    def problem(self) -> str:
        """Why the writer does not write now; empty while it does."""
        return "" if self._error is None else self._error.reason

    @property
    def lag_seconds(self) -> float:
        """How long the oldest waiting item has waited."""
        now = oldest = time.monotonic()
        for lane in tuple(self._lanes.values()):
            with suppress(IndexError):  # another thread, of the metrics, asks while the lane empties
                oldest = min(oldest, lane.items[0].taken_at)
        return max(0.0, now - oldest)

    @property
    def buffered_bytes(self) -> int:
        """The size of the waiting items."""
        return self._buffered

    @property
    def has_room(self) -> bool:
        """Whether there is room for another item to wait."""
        return self._buffered < self._settings.durable_log.buffer_bytes

    async def write(self, item: StreamItem, *, stop: asyncio.Event | None = None) -> None:
        """Take the next item of its stream once there is room, or `stop` is set."""
        events = (self._room,) if stop is None else (self._room, stop)
        while not (self.has_room or (stop is not None and stop.is_set())):
            self._room.clear()
            await first_of(*events)
        self.take(item)

    def take(self, item: StreamItem, logged: Callable[[], None] = lambda: None) -> None:
        """Take an item without regard to room; `logged` is called once it is in the log, or refused for its size."""
        lane = self._lane(item)
        left_out = len(lane.left_out) if lane.left_out.stop == item.sequence else 0
        waiting = _Waiting(item, left_out, logged)
        self._buffered += waiting.size
        lane.items.append(waiting)
        if lane.task is None:
            lane.task = asyncio.create_task(self._write(lane))

    def leave_out(self, item: StreamItem) -> None:
        """Note that an item is not written, so that the writer does not wait for another one to write it."""
        lane = self._lane(item)
        begin = lane.left_out.start if lane.left_out.stop == item.sequence else item.sequence
        lane.left_out = range(begin, item.sequence + 1)

    def _lane(self, item: StreamItem) -> _Lane:
        key = worker_id, epoch = item.worker_id, item.epoch
        lane = self._lanes.get(key)
        if lane is None:
            if len(self._lanes) >= _MOST_LANES:  # an idle lane can be read from the log again
                self._lanes = {name: each for name, each in self._lanes.items() if each.task is not None}
            lane = self._lanes[key] = _Lane(self._stream.subject(worker_id, epoch))
        return lane

    async def _run(self) -> None:
        """Keep a connection; after any failure connect again, since all items wait for it."""
        while True:
            try:
                server = await self._connect()
                try:
                    await self._use(server)
                finally:
                    self._connected.clear()
                    self._server = None
                    await server.close()
            except Exception as error:  # noqa: BLE001 - whatever it is
                self._fault(error)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _connect(self) -> ServerConnection:
        """Connect, and log meanwhile why there is no connection."""
        connecting = asyncio.create_task(self._stream.connect())
        try:
            while not (await asyncio.wait({connecting}, timeout=self._interval))[0]:
                self._fault(AddressError(self._stream.address, self._stream.reason))
            return connecting.result()
        finally:
            await end_tasks(connecting)

    async def _use(self, server: ServerConnection) -> None:
        """Let the lanes write to a server until the connection is lost or the stream is not well; raises LogError."""
        info = await self._stream.info(server, make=True, tell=self._fault)
        self.largest_message = self._stream.largest_message(server, info)
        while not server.lost.is_set():
            if self._created not in {None, info.created}:  # it was deleted, or restored from a backup
                _log.error("log was made anew", log=self._stream.address, messages=info.state.messages)
                for lane in self._lanes.values():  # the log names the items that it does not have any more
                    lane.last, lane.revision = 0, None
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
        """Keep and log why the writer does not write."""
        self._error = error if isinstance(error, AddressError) else LogError(self._stream.address, reason_of(error))
        self._news.set()
        reason = self._error.reason
        self._repeated_log.begin(reason, _log.warning, "not written to the log yet", reason=reason)

    def _recovered(self) -> None:
        """Clear the fault, if the writer is connected."""
        if self._error is not None and self._connected.is_set():
            self._error = None
            self._news.set()
            self._repeated_log.close()
            _log.info("writing", log=self._stream.address)

    async def _write(self, lane: _Lane) -> None:
        """Write a lane's items until there are none."""
        while lane.items:
            await self._connected.wait()
            if (server := self._server) is None:
                continue
            try:
                if lane.revision is None:
                    await self._read_last(lane, server)
                self._drop_known(lane)
                if lane.items and not await self._is_waiting(lane):
                    await self._write_next(lane, server)
            except Exception as error:  # noqa: BLE001 - whatever it is, the items stay, and are written later
                lane.revision = None
                if getattr(error, "err_code", 0) != _WRONG_LAST_SEQUENCE:
                    await self._failed(server, error)
        lane.task = None
        self._recovered()

    async def _failed(self, server: ServerConnection, error: Exception) -> None:
        """Count and log a failed write, and wait a little."""
        self.counts.failed_writes += 1
        if not server.lost.is_set():  # else the next connection says why
            self._fault(error)
        await asyncio.sleep(_RETRY_SECONDS)

    async def _read_last(self, lane: _Lane, server: ServerConnection) -> None:
        """Ask the server for the last message of a lane's subject, and set how far the log has the life."""
        try:
            message = await server.ask(server.jetstream.get_last_msg(self._stream.name, lane.subject))
        except NotFoundError as error:
            if error.err_code == _NO_STREAM:
                raise
            lane.revision = 0
            return
        lane.last = max(lane.last, await self._stream.last_sequence(server, lane.subject, message))
        lane.revision = message.seq

    def _drop_known(self, lane: _Lane) -> None:
        while lane.items and lane.items[0].item.sequence <= lane.last:
            self.counts.already_there += 1
            self._forget_first(lane)

    async def _is_waiting(self, lane: _Lane) -> bool:
        """Return whether to wait on for another writer's items that are missing before the first; pauses if so."""
        first, loop = lane.items[0], asyncio.get_running_loop()
        if first.item.sequence - first.left_out <= lane.last + 1:
            lane.hole_since = None
            return False
        if lane.hole_since is None or lane.hole_since[0] != lane.last:
            lane.hole_since = lane.last, loop.time()
        if loop.time() - lane.hole_since[1] >= self._wait_seconds:
            return False
        lane.revision = None
        await asyncio.sleep(_RETRY_SECONDS)
        return True

    async def _write_next(self, lane: _Lane, server: ServerConnection) -> None:
        """Write the next run of a lane's items as one message."""
        first = lane.items[0].item
        recorder = Recorder(first.epoch, first.hello, first_sequence=lane.last + 1)
        most = min(self._settings.durable_log.message_bytes, self.largest_message)
        parts: list[bytes] = []
        size = 0
        for waiting in lane.items:
            is_next = waiting.item.sequence == recorder.last_sequence + 1
            if parts and not (is_next and size + waiting.size <= most):
                break
            parts.append(recorder.add(waiting.item))
            size += len(parts[-1])
        if size > self.largest_message:
            self._refuse_first(lane, size)
            return
        headers = {
            Header.EXPECTED_STREAM.value: self._stream.name,
            Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(lane.revision),
        }
        ack = await server.ask(server.jetstream.publish(lane.subject, b"".join(parts), headers=headers))
        self._recovered()
        lane.revision = ack.seq
        lane.last = recorder.last_sequence
        self.counts.messages += 1
        self.counts.items += recorder.items
        self.counts.payload_bytes += recorder.payload_bytes
        if recorder.missing_items:
            self.counts.missing_items += recorder.missing_items
            _log.warning("items are missing", stream=first.worker_id, epoch=first.epoch, before=first.sequence)
        for _ in range(recorder.items):
            self._forget_first(lane)

    def _refuse_first(self, lane: _Lane, size: int) -> None:
        """Drop the first item, which is too large for the server."""
        item = lane.items[0].item
        self.counts.refused_items += 1
        stream, most = item.worker_id, self.largest_message
        _log.error("item is too large for the log", stream=stream, sequence=item.sequence, bytes=size, most=most)
        self._forget_first(lane)

    def _forget_first(self, lane: _Lane) -> None:
        waiting = lane.items.popleft()
        self._buffered -= waiting.size
        self._room.set()
        waiting.logged()
