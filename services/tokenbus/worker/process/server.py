"""PublisherServer: runs the publisher's process on one event loop."""

import asyncio
import contextlib
import os
import socket
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenbus.bus import Transport
from tokenbus.clock import Clock
from tokenbus.logs import logger
from tokenbus.metrics.publisher import serve_publisher
from tokenbus.settings import SECTIONS, Settings
from tokenbus.worker.engine import EngineDescription
from tokenbus.worker.engine_publisher import EnginePublisher
from tokenbus.worker.errors import NotRunningError, RetentionFullError
from tokenbus.worker.process import arrays
from tokenbus.worker.process.journal import JournaledRetention
from tokenbus.worker.process.memory import SharedMemory
from tokenbus.worker.process.records import ID_COUNT, READY, WAKE, EngineRecord, PublisherRecord, SharedCounts, Word
from tokenbus.worker.process.ring import Record
from tokenbus.worker.publisher import Publisher
from tokenbus.worker.request_queue import RequestQueue
from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.control_pb2 import Control, EngineState
from tokenbus_contracts.generated.request_pb2 import Abort, Admitted, ErrorCode, Generate, RequestEvent

_log = logger("worker")
_RECORDS_AT_ONCE = 8  # number of records to publish before the event loop sends and receives again
_HEADER_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Introduction:
    """Facts that the engine's process passes to a new publisher."""

    settings: Settings
    vocabulary_size: int
    description: EngineDescription
    epoch: int
    proof: bytes
    requests: list[tuple[int, int, str]]
    """Id, owner and turn of each request of the worker that is not in the ring of requests."""
    requests_tail: int
    """Position in the ring of requests up to which `requests` lists the open requests."""
    takes_no_more: bool
    leaves: bool
    """Whether the engine has stopped writing records."""
    engine: int = 0
    """Process id of the engine, or 0 for an engine in this process."""
    engine_state: str = ""
    """Encoded EngineState in hexadecimal digits, or an empty text before the first command of an operator."""

    @classmethod
    def of(cls, given: dict[str, Any]) -> "Introduction":
        sections = {name: maker(**given["settings"][name]) for name, maker in SECTIONS.items()}
        description = EngineDescription(**given["description"])
        proof = bytes.fromhex(given["proof"])
        return cls(**{**given, "settings": Settings(**sections), "description": description, "proof": proof})


class _RequestRing(RequestQueue):
    """Writes requests, aborts and commands for the engine into shared memory."""

    def __init__(self, memory: SharedMemory, bell: socket.socket, max_requests: int) -> None:
        super().__init__(max_requests)
        self._ring, self._bell = memory.requests, bell
        self.engine_is_gone = False
        self.on_arrival = self.ring_bell

    def __len__(self) -> int:
        return len(self._ring)

    def put(self, request: Generate | Abort) -> None:
        if not self.engine_is_gone:  # the engine is gone, so the processor later sends the request to another worker
            super().put(request)

    def _append(self, request: Generate | Abort, limit: str) -> None:
        kind = PublisherRecord.GENERATE if isinstance(request, Generate) else PublisherRecord.ABORT
        self._write(kind, request, limit)

    def put_control(self, control: Control) -> None:
        self._write(PublisherRecord.CONTROL, control, "a command that the engine has room for")
        self.ring_bell()

    def _write(self, kind: PublisherRecord, message: Generate | Abort | Control, limit: str) -> None:
        data = message.SerializeToString()
        if not self._ring.has_room(len(data)):
            raise ContractError(kind.name.lower(), limit, f"{len(data)} bytes")
        self._ring.put(kind, data)

    def put_ended(self, request_ids: deque[int]) -> None:
        """Tell the engine which requests the publisher ended, and clear `request_ids`, unless the ring is full."""
        if request_ids and self._ring.has_room(8 * len(request_ids)):
            self._ring.put(PublisherRecord.ENDED, np.array(request_ids, np.uint64).tobytes())
            request_ids.clear()
            self.ring_bell()

    def ring_bell(self) -> None:
        """Wake the engine, because the engine can read or write a record."""
        with contextlib.suppress(OSError):  # the socket's buffer is full of unread bytes, or the engine died
            self._bell.send(WAKE)


class _SharedPublisher(Publisher):
    """A publisher with its state in shared memory, which never blocks its event loop while retention is full."""

    def __init__(self, memory: SharedMemory, incoming: RequestQueue, given: Introduction, **others: Any) -> None:  # noqa: ANN401
        worker = given.settings.worker
        self.made_room = asyncio.Event()
        self._steps, self._words = memory.steps, memory.words
        self.journal = JournaledRetention(
            worker.most_items,
            worker.retention_bytes,
            checksum=worker.checksum,
            journal=memory.journal,
            words=memory.words,
        )
        super().__init__(
            given.settings,
            vocabulary_size=given.vocabulary_size,
            epoch=memory.words[Word.EPOCH] or given.epoch,
            description=given.description,
            proof=given.proof,
            retention=self.journal,
            incoming=incoming,
            **others,
        )
        memory.words[Word.STARTS] += 1
        self.starts = memory.words[Word.STARTS]
        self.counts = SharedCounts(memory.words)
        for request_id, owner, turn in given.requests:
            self.session.requests[request_id] = owner, Admitted.FromString(bytes.fromhex(turn)) if turn else None
        for record in memory.requests.waiting(given.requests_tail):
            if record.kind == PublisherRecord.GENERATE:
                self.session.add_request(Generate.FromString(bytes(record.data)))
        if given.engine_state:
            self.session.set_engine_state(EngineState.FromString(bytes.fromhex(given.engine_state)))
        if given.takes_no_more:
            self.take_no_more()

    @property
    def waiting_records(self) -> int:
        return self._steps.waiting_count

    @property
    def _engine_waits(self) -> bool:
        return not self._steps.is_empty

    def _begin_epoch(self, epoch: int) -> None:
        self._words[Word.EPOCH] = epoch  # stored before the journal drops the items of the old epoch
        super()._begin_epoch(epoch)

    def _made_room(self) -> None:
        super()._made_room()
        self.made_room.set()

    def _wait_for_room(self, size: int) -> bool:  # noqa: ARG002 - PublisherServer has waited already
        return False


class PublisherServer:
    """Publishes the records of an engine's process until one of the two processes leaves."""

    def __init__(
        self,
        memory: SharedMemory,
        bell: socket.socket,
        given: Introduction,
        *,
        transport: Transport | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._steps, self._bell = memory.steps, bell
        self._settings = given.settings
        self._requests = _RequestRing(memory, bell, given.settings.worker.max_requests)
        self.publisher = _SharedPublisher(memory, self._requests, given, transport=transport, clock=clock)
        self._clock = self.publisher.clock
        self._engine_publisher = EnginePublisher(self.publisher, given.vocabulary_size)
        self._ended: deque[int] = deque()
        self._leaves = given.leaves
        self._engine = given.engine
        self._waits_since: float | None = None

    async def run(self) -> None:
        """Publish until the engine's process leaves or dies, and everything is acknowledged."""
        publisher = self.publisher
        # Publish the waiting records first, so that the first hello covers as many of them as retention can hold.
        publisher.begin()
        while self._publish_some() == 0:
            pass
        with serve_publisher(publisher):
            async with publisher:
                loop = asyncio.get_running_loop()
                loop.add_reader(self._bell, self._on_bell)
                with contextlib.suppress(OSError):  # if the engine died, `_on_bell` notices
                    self._bell.send(READY)
                try:
                    await self._publish_all()
                finally:
                    loop.remove_reader(self._bell)

    async def _publish_all(self) -> None:
        wake = self.publisher.made_room
        while True:
            wake.clear()
            if not self.publisher.is_running:
                return  # if the connection failed, the end of `async with` raises the error
            # The socket does not show the engine's death while a child of the engine's process holds the other end.
            if self._engine and os.getppid() != self._engine:
                self._requests.engine_is_gone = True
            seconds = self._publish_some()
            if self._steps.is_empty:
                if self._leaves:
                    return
                if self._requests.engine_is_gone:
                    self._end_all()
                    return
            if seconds:
                await self._clock.wait(wake, seconds)
            else:
                await asyncio.sleep(0)

    def _on_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                is_gone = not self._bell.recv(65536)
            except ConnectionError:
                is_gone = True
            if is_gone:
                asyncio.get_running_loop().remove_reader(self._bell)
                self._requests.engine_is_gone = True
        self.publisher.made_room.set()

    def _publish_some(self) -> float:
        """Publish some records, and return how many seconds to wait for more, or 0 if more records are waiting."""
        number = self._steps.taken
        seconds = self._settings.bus.heartbeat_interval_ms / 1000
        for count, record in enumerate(self._steps.waiting()):
            if count == _RECORDS_AT_ONCE:
                seconds = 0
                break
            if wait := self._seconds_for_room(record):
                seconds = min(seconds, wait)
                break
            self.publisher.journal.begin(record.number)
            try:
                self._publish(record)
            except NotRunningError:
                raise
            except Exception:  # noqa: BLE001 - or each new publisher would fail at the same record
                _log.exception("a step was not published")
                self.publisher.lose_all()
            self.publisher.journal.begin(0)
            self._ended.extend(self._engine_publisher.take_aborts())
            self._requests.put_ended(self._ended)
            self._steps.take(record)
        self._requests.put_ended(self._ended)
        if self._steps.taken > number:
            self._requests.ring_bell()
        return seconds

    def _seconds_for_room(self, record: Record) -> float:
        """Return how many seconds a record may still wait while retention is full, or 0 to publish the record now."""
        retention, worker, data = self.publisher.retention, self._settings.worker, record.data
        messages = self._messages_of(record)
        if not messages:
            return 0
        has_room = retention.has_room(2 * len(data) + _HEADER_BYTES, messages) or not len(retention)
        now = self._clock.now()
        if has_room or worker.policy == "fail":
            if self._waits_since is not None:
                self.publisher.blocked_seconds += now - self._waits_since
            self._waits_since = None
            return 0
        if self._waits_since is None:
            self._waits_since = now
            self.publisher.blocked += 1
        return max(0.0, self._waits_since + worker.block_timeout_ms / 1000 - now)

    def _messages_of(self, record: Record) -> int:
        """Estimate the number of messages that a record will need."""
        match record.kind:
            case EngineRecord.STEP:
                step, limits = arrays.read(record.data), self._settings.limits
                by_rows: int = step.request_ids.size // limits.max_rows
                return max(step.parts, 1 + by_rows, 1 + len(record.data) // limits.max_message_bytes)
            case EngineRecord.REFUSED:
                return int(ID_COUNT.unpack_from(record.data)[0])
            case EngineRecord.LOST | EngineRecord.NO_MORE | EngineRecord.LEAVE:
                return 0
        return 1

    def _publish(self, record: Record) -> None:
        data = record.data
        match record.kind:
            case EngineRecord.STEP:
                self._engine_publisher.emit(arrays.read(data))
            case EngineRecord.EVENT:
                self._engine_publisher.publish_event(RequestEvent.FromString(bytes(data)))
            case EngineRecord.REFUSED:
                end = ID_COUNT.size + 8 * ID_COUNT.unpack_from(data)[0]
                request_ids = np.frombuffer(bytes(data[ID_COUNT.size : end]), np.uint64).tolist()
                self._engine_publisher.refuse(request_ids, bytes(data[end:]).decode())
            case EngineRecord.LOST:
                if lost := np.frombuffer(data, np.uint64).tolist():
                    self.publisher.lose(lost)
                else:
                    self.publisher.lose_all()
            case EngineRecord.NO_MORE:
                self.publisher.take_no_more()
            case EngineRecord.LEAVE:
                self._leaves = True

    def _end_all(self) -> None:
        self.publisher.take_no_more()
        requests = sorted(self.publisher.session.requests)
        ended = {"worker": self.publisher.worker_id, "requests_ended": len(requests)}
        _log.error("the engine's process died: its requests end", **ended)
        for request_id in requests:
            with contextlib.suppress(RetentionFullError):  # if retention is full, a gap ends the request
                self.publisher.failed_request(request_id, ErrorCode.ERROR_CODE_ENGINE, "the engine's process died")
