"""PublisherServer: what the publisher's process does, on one event loop."""

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
from tokenbus.worker.engine import Model
from tokenbus.worker.engine_publisher import EnginePublisher
from tokenbus.worker.errors import NotRunningError, RetentionFullError
from tokenbus.worker.process import arrays
from tokenbus.worker.process.journal import JournaledRetention
from tokenbus.worker.process.memory import SharedMemory
from tokenbus.worker.process.records import (
    ADMITTED,
    FAILED,
    IDS,
    READY,
    UNKNOWN,
    WAKE,
    EngineRecord,
    PublisherRecord,
    SharedCounts,
    Word,
)
from tokenbus.worker.process.ring import Record
from tokenbus.worker.publisher import Publisher
from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.control_pb2 import Control, ControlAnswer, EngineState
from tokenbus_contracts.generated.request_pb2 import Abort, ErrorCode, Generate, Prefilled, PromptScoresChunk

_log = logger("worker")
_AT_ONCE = 8
"""How many records are published before the event loop sends and receives."""
_HEADER_BYTES = 1024
_ENGINE_DIED = "the engine's process died"


@dataclass(frozen=True, slots=True)
class Introduction:
    """What the engine's process says to a publisher that it starts."""

    settings: Settings
    vocabulary_size: int
    model: Model | None
    epoch: int
    proof: bytes
    requests: list[tuple[int, int]]
    """The ids and owners of the requests that the worker has, but for those that wait in the ring."""
    requests_tail: int
    """Where the ring of requests began when that was said."""
    takes_no_more: bool
    leaves: bool
    """Whether the engine hands nothing more over."""
    takes_control: bool = False
    continues_requests: bool = False
    engine: int = 0
    """The engine's process, which started this one; 0: they are one."""
    engine_state: str = ""
    """An EngineState in hexadecimal digits, once an operator has asked for anything."""

    @classmethod
    def of(cls, given: dict[str, Any]) -> "Introduction":
        """Return what the engine's process wrote as JSON."""
        sections = {name: maker(**given["settings"][name]) for name, maker in SECTIONS.items()}
        model = given["model"]
        if model is not None:
            model = Model(**{**model, "lora_adapters": tuple(model["lora_adapters"])})
        proof = bytes.fromhex(given["proof"])
        return cls(**{**given, "settings": Settings(**sections), "model": model, "proof": proof})


class _Publisher(Publisher):
    """A publisher whose requests go into the ring, and that never blocks its event loop for room."""

    def __init__(self, memory: SharedMemory, bell: socket.socket, given: Introduction, **others: Any) -> None:  # noqa: ANN401
        worker = given.settings.worker
        self.made_room = asyncio.Event()
        self.engine_is_gone = False
        self._steps, self._ring, self._bell = memory.steps, memory.requests, bell
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
            model=given.model,
            proof=given.proof,
            takes_control=given.takes_control,
            continues_requests=given.continues_requests,
            retention=self.journal,
            **others,
        )
        self._words = memory.words
        memory.words[Word.STARTS] += 1
        self.starts = memory.words[Word.STARTS]
        self.counts = SharedCounts(memory.words)
        for key, owner in given.requests:
            self.session.add_request(Generate(request_id=key, owner=owner))
        for record in memory.requests.waiting(given.requests_tail):
            if record.kind == PublisherRecord.GENERATE:
                self.session.add_request(Generate.FromString(bytes(record.data)))
        if given.engine_state:
            self.session.set_engine_state(EngineState.FromString(bytes.fromhex(given.engine_state)))
        if given.takes_no_more:
            self.take_no_more()

    @property
    def waiting_records(self) -> int:
        """How many records of the engine's wait."""
        return self._steps.waiting_count

    @property
    def waiting_requests(self) -> int:
        return len(self._ring)

    @property
    def _is_blocked(self) -> bool:
        return not self._steps.is_empty

    def take_request(self, request: Generate | Abort) -> None:
        """Bring a request or an abort to the engine; a ContractError says that there is no room for it."""
        most = 2 * self.settings.worker.max_requests
        if self.engine_is_gone or (not most and isinstance(request, Abort)):
            return  # with the goodbye the processor gives what was not admitted to another worker
        limit = f"at most {most} requests that the engine has not taken yet"
        if len(self._ring) >= most:
            raise ContractError("generate", limit, len(self._ring) + 1)
        self._bring(
            PublisherRecord.GENERATE if isinstance(request, Generate) else PublisherRecord.ABORT, request, limit
        )

    def take_control(self, control: Control) -> None:
        """Bring a command to the engine; a ContractError says that there is no room for it."""
        self._bring(PublisherRecord.CONTROL, control, "a command that the engine has room for")

    def _bring(self, kind: PublisherRecord, message: Generate | Abort | Control, limit: str) -> None:
        data = message.SerializeToString()
        if not self._ring.has_room(len(data)):
            raise ContractError(kind.name.lower(), limit, f"{len(data)} bytes")
        self._ring.put(kind, data)
        self.ring_bell()

    def bring_ended(self, keys: deque[int]) -> None:
        """Tell the engine which requests have ended here, as soon as there is room to."""
        if keys and self._ring.has_room(8 * len(keys)):
            self._ring.put(PublisherRecord.ENDED, np.array(keys, np.uint64).tobytes())
            keys.clear()
            self.ring_bell()

    def ring_bell(self) -> None:
        """Tell the engine that something was brought, or taken."""
        with contextlib.suppress(OSError):  # it has many bells to hear, or it died
            self._bell.send(WAKE)

    def _begin_epoch(self, epoch: int) -> None:
        self._words[Word.EPOCH] = epoch  # before the journal is empty: what it has is not the next epoch's
        super()._begin_epoch(epoch)

    def _made_room(self) -> None:
        super()._made_room()
        self.made_room.set()

    def _wait_for_room(self, size: int) -> bool:  # noqa: ARG002 - who calls it has waited already
        return False


class PublisherServer:
    """Publishes what an engine's process hands over, and brings it what comes for it, until one of the two leaves."""

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
        self.publisher = _Publisher(memory, bell, given, transport=transport, clock=clock)
        self._clock = self.publisher.clock
        self._engine_publisher = EnginePublisher(self.publisher, given.vocabulary_size)
        self._ended: deque[int] = deque()
        """The requests that ended here, of which the engine has not heard yet."""
        self._leaves = given.leaves
        self._engine = given.engine
        self._waits_since: float | None = None

    async def run(self) -> None:
        """Publish until the engine's process leaves or dies, and all is acknowledged."""
        publisher = self.publisher
        # What was handed over before is in the first hello, as far as there is room for it.
        publisher.begin()
        while self._publish_some() == 0:
            pass
        with serve_publisher(publisher):
            async with publisher:
                loop = asyncio.get_running_loop()
                loop.add_reader(self._bell, self._heard)
                with contextlib.suppress(OSError):  # it died meanwhile, which the reader hears
                    self._bell.send(READY)
                try:
                    await self._publish_all()
                finally:
                    loop.remove_reader(self._bell)

    async def _publish_all(self) -> None:
        """Publish what is handed over until there will be nothing more."""
        wake = self.publisher.made_room
        while True:
            wake.clear()
            if not self.publisher.is_running:
                return  # its connection failed, which is raised next
            # The bell says it at once, unless a child of the engine's holds its other end.
            if self._engine and os.getppid() != self._engine:
                self.publisher.engine_is_gone = True
            seconds = self._publish_some()
            if self._steps.is_empty:
                if self._leaves:
                    return
                if self.publisher.engine_is_gone:
                    self._end_all()
                    return
            if seconds:
                await self._clock.wait(wake, seconds)
            else:
                await asyncio.sleep(0)

    def _heard(self) -> None:
        """Hear the engine's bell, or that its process is gone."""
        with contextlib.suppress(BlockingIOError):
            try:
                is_gone = not self._bell.recv(65536)
            except ConnectionError:
                is_gone = True
            if is_gone:
                asyncio.get_running_loop().remove_reader(self._bell)
                self.publisher.engine_is_gone = True
        self.publisher.made_room.set()

    def _publish_some(self) -> float:
        """Publish some of what is handed over; return for how long to wait at most, or 0 where there is more."""
        number = self._steps.taken
        seconds = self._settings.bus.heartbeat_interval_ms / 1000
        for place, record in enumerate(self._steps.waiting()):
            if place == _AT_ONCE:
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
            self.publisher.bring_ended(self._ended)
            self._steps.take(record)
        self.publisher.bring_ended(self._ended)
        if self._steps.taken > number:
            self.publisher.ring_bell()
        return seconds

    def _seconds_for_room(self, record: Record) -> float:
        """Return for how long a record waits for room in retention, at most: 0 where there is some, or it must not."""
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
        """Return how many messages are made of a record, as far as can be said before it is published."""
        match record.kind:
            case EngineRecord.STEP:
                step, limits = arrays.read(record.data), self._settings.limits
                by_rows: int = step.request_ids.size // limits.max_rows
                return max(step.parts, 1 + by_rows, 1 + len(record.data) // limits.max_message_bytes)
            case EngineRecord.REFUSED:
                return int(IDS.unpack_from(record.data)[0])
            case EngineRecord.LOST | EngineRecord.NO_MORE | EngineRecord.LEAVE:
                return 0
        return 1

    def _publish(self, record: Record) -> None:
        data = record.data
        match record.kind:
            case EngineRecord.STEP:
                self._engine_publisher.emit(arrays.read(data))
            case EngineRecord.ADMITTED:
                key, prompt_tokens, cached = ADMITTED.unpack(data)
                self._engine_publisher.admitted(key, prompt_tokens, None if cached == UNKNOWN else cached)
            case EngineRecord.SCORED | EngineRecord.CONTROLLED | EngineRecord.PREFILLED:
                self._publish_message(record.kind, bytes(data))
            case EngineRecord.FAILED:
                key, code = FAILED.unpack_from(data)
                self._engine_publisher.failed(key, code, bytes(data[FAILED.size :]).decode())
            case EngineRecord.REFUSED:
                count, begin = *IDS.unpack_from(data), IDS.size
                keys, message = data[begin : begin + 8 * count], bytes(data[begin + 8 * count :]).decode()
                self._engine_publisher.refuse(np.frombuffer(bytes(keys), np.uint64).tolist(), message)
            case EngineRecord.LOST:
                if lost := np.frombuffer(data, np.uint64).tolist():
                    self.publisher.lose(lost)
                else:
                    self.publisher.lose_all()
            case EngineRecord.NO_MORE:
                self.publisher.take_no_more()
            case EngineRecord.LEAVE:
                self._leaves = True

    def _publish_message(self, kind: int, data: bytes) -> None:
        match kind:
            case EngineRecord.SCORED:
                self._engine_publisher.scored(PromptScoresChunk.FromString(data))
            case EngineRecord.CONTROLLED:
                self._engine_publisher.controlled(ControlAnswer.FromString(data))
            case EngineRecord.PREFILLED:
                self._engine_publisher.prefilled(Prefilled.FromString(data))

    def _end_all(self) -> None:
        self.publisher.take_no_more()
        requests = sorted(self.publisher.session.requests)
        ended = {"worker": self.publisher.worker_id, "requests_ended": len(requests)}
        _log.error("the engine's process died: its requests end", **ended)
        for key in requests:
            with contextlib.suppress(RetentionFullError):  # then a gap names it
                self.publisher.failed_request(key, ErrorCode.ERROR_CODE_ENGINE, _ENGINE_DIED)
