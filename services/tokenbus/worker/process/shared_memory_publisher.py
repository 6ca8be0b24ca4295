"""SharedMemoryPublisher: the engine's side of the memory that the engine shares with a publisher's process."""

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenbus.delivery.step import LEAVES
from tokenbus.settings import Settings
from tokenbus.worker.active import ActiveRequests
from tokenbus.worker.engine_output import EngineOutput
from tokenbus.worker.errors import NotRunningError
from tokenbus.worker.process import arrays
from tokenbus.worker.process.memory import SharedMemory
from tokenbus.worker.process.records import ID_COUNT, WAKE, EngineRecord, PublisherRecord, SharedCounts
from tokenbus.worker.process.ring import RECORD_BYTES
from tokenbus.worker.ragged import Host, request_ids_of, valid_request_ids
from tokenbus.worker.session import turn_of
from tokenbus.worker.step import StepArrays
from tokenbus_contracts import BatchKind, ContractError
from tokenbus_contracts.generated.control_pb2 import Control
from tokenbus_contracts.generated.request_pb2 import Abort, Generate, RequestEvent

_CHANGED = (b"", b"")
_MAX_LOST = 65_536  # maximum number of requests that a gap may name
_POLL_SECONDS = 0.05  # seconds between checks of a full ring, because a publisher that died cannot wake the engine


@dataclass(slots=True)
class _Open:
    owner: int = 0
    turn: str = ""
    """Encoded `Admitted` message with the request's turn, in hexadecimal digits, or an empty string without a turn."""


class SharedMemoryPublisher(EngineOutput):
    """Writes an engine's steps and events into shared memory, for a publisher in another process.

    Only the engine's thread uses this object, except for `take_no_more` and `leave`.
    """

    def __init__(self, settings: Settings, memory: SharedMemory, epoch: int) -> None:
        self.settings, self.epoch = settings, epoch
        self.active = ActiveRequests()
        self.counts = SharedCounts(memory.words)
        self.bell: socket.socket | None = None
        self.has_publisher = threading.Event()
        self.is_running = False
        self._steps, self._requests = memory.steps, memory.requests
        self._lock = threading.Lock()  # guards writes to the ring, and the requests that a new publisher must know
        self._open: dict[int, _Open] = {}
        """Requests that a new publisher must know. A request stays until the publisher has read the request's end."""
        self._ending: deque[tuple[int, list[tuple[int, _Open]]]] = deque()
        """Ended requests, with the number of the record that ended each request."""
        self._last_step = 0
        self._last_rows = _CHANGED  # ids and statuses of the last step, or `_CHANGED` after a request ended
        self._arrived: list[Generate | Abort] = []
        self._controls: list[Control] = []
        self._aborts: list[int] = []
        self._lost: set[int] = set()  # requests that lost rows and are not yet named in a record
        self._has_lost_all = False  # whether all requests must end, because too many lost rows
        self._engine_state = ""
        self._takes_no_more = self._leaves = False
        self._owes_no_more = False  # whether the record NO_MORE must still be written

    def state(self) -> dict[str, object]:
        """Return the facts that a new publisher needs, but cannot read from the shared memory."""
        with self._lock:
            self._forget_ended()
            return {
                "requests": [(request_id, each.owner, each.turn) for request_id, each in self._open.items()],
                "requests_tail": self._requests.tail,
                "takes_no_more": self._takes_no_more,
                "leaves": self._leaves,
                "engine_state": self._engine_state,
            }

    def publish_event(self, event: RequestEvent) -> None:
        """Write an event. If the ring stays full, the event's request ends, or an operator's answer is dropped."""
        request_ids: tuple[int, ...] = ()
        if event.HasField("control_answer"):
            if event.control_answer.HasField("state"):
                self._engine_state = event.control_answer.state.SerializeToString().hex()
        else:
            request_ids = (getattr(event, str(event.WhichOneof("event"))).request_id,)
        ends = request_ids if event.HasField("error") else ()
        self.active.end(ends)
        self._write(EngineRecord.EVENT, event.SerializeToString(), request_ids, ends)

    def emit(self, step: StepArrays) -> None:
        """Write one batch of a step. If the ring stays full, the batch's requests end."""
        self._check_running()
        self.counts.signs += 1
        try:
            hosted = arrays.hosted(step, self.settings.worker.handover_bytes)
        except ContractError as error:
            self._refuse(step, error)
            return
        request_ids = request_ids_of(hosted.arrays[0][1])
        if not self._has_room(hosted.size + RECORD_BYTES):  # in case another thread writes NO_MORE now
            self._lose(request_ids.tolist())
            return
        with self._lock:
            arrays.write(step, self._number(step), hosted, self._steps.room(hosted.size))
            number = self._steps.commit(EngineRecord.STEP, hosted.size)
            if step.kind is BatchKind.TARGET:
                self._note_rows(number, request_ids, hosted.get("statuses"))
        self._ring_bell()

    def _number(self, step: StepArrays) -> int:
        """Return a step's number, counted in this process because the assembler of each new publisher begins again."""
        number = step.step or self._last_step + (step.kind is BatchKind.TARGET) or 1
        self._last_step = max(self._last_step, number)
        return number

    def _refuse(self, step: StepArrays, error: ContractError) -> None:
        request_ids = valid_request_ids(step.request_ids)
        data = ID_COUNT.pack(len(request_ids)) + np.array(request_ids, np.uint64).tobytes() + str(error).encode()
        self._write(EngineRecord.REFUSED, data, request_ids)

    def take_no_more(self) -> None:
        with self._lock:
            self._takes_no_more = self._owes_no_more = True
        self._write_overdue()
        self._ring_bell()

    def leave(self, seconds: float) -> None:
        """Accept no more steps, and write the record LEAVE. If the ring is full, wait at most `seconds`.

        If the ring stays full, the next publisher learns from `state` that the engine has left.
        """
        with self._lock:
            self.is_running, self._leaves = False, True
        deadline = time.monotonic() + seconds
        while True:
            self._write_overdue()
            with self._lock:
                if has_room := self._steps.has_room(0):
                    self._steps.put(EngineRecord.LEAVE)
            if has_room or time.monotonic() >= deadline:
                break
            self._wait(_POLL_SECONDS)
        self._ring_bell()

    def flush(self, seconds: float) -> None:
        """Block for at most `seconds` until all written records are published."""
        deadline = time.monotonic() + seconds
        self._write_overdue()
        while len(self._steps) and (left := deadline - time.monotonic()) > 0:
            self._wait(min(left, _POLL_SECONDS))

    def _write(self, kind: EngineRecord, data: bytes, request_ids: Collection[int], ends: Collection[int] = ()) -> None:
        self._check_running()
        self.counts.signs += 1
        if not self._has_room(len(data)):
            self._lose(request_ids)
            return
        with self._lock:
            number = self._steps.put(kind, data)
            self._note_ended(number, ends)
        self._ring_bell()

    def _has_room(self, size: int) -> bool:
        """Return whether a record fits into the ring, after waiting as long as the policy allows."""
        if not self._has_overdue and self._steps.has_room(size):
            return True
        worker = self.settings.worker
        deadline = time.monotonic() + (0 if worker.policy == "fail" else worker.block_timeout_ms / 1000)
        while True:
            self._write_overdue()
            if not self._has_overdue and self._steps.has_room(size):
                return True
            if time.monotonic() >= deadline:
                return False
            self._check_running()
            self._wait(_POLL_SECONDS)

    @property
    def _has_overdue(self) -> bool:
        return bool(self._lost or self._has_lost_all or self._owes_no_more)

    def _lose(self, request_ids: Collection[int]) -> None:
        """End the requests of a record that did not fit. The next LOST record names these requests."""
        with self._lock:
            self._lost.update(request_ids)
            if len(self._lost) > _MAX_LOST:
                self._has_lost_all = True
                self._lost.clear()
        self.active.end(request_ids)
        self._aborts.extend(request_ids)

    def _write_overdue(self) -> None:
        """Write the overdue records NO_MORE and LOST if they fit into the ring."""
        if not self._has_overdue:
            return
        with self._lock:
            if self._owes_no_more and self._steps.has_room(0):
                self._steps.put(EngineRecord.NO_MORE)
                self._owes_no_more = False
            if not (self._lost or self._has_lost_all):
                return
            lost = () if self._has_lost_all else sorted(self._lost)
            if self._steps.has_room(8 * len(lost)):
                number = self._steps.put(EngineRecord.LOST, np.array(lost, np.uint64).tobytes())
                self._note_ended(number, lost or list(self._open))
                self._lost.clear()
                self._has_lost_all = False

    def _check_running(self) -> None:
        if not self.is_running:
            raise NotRunningError("the publisher is not running: it was not started, or it was closed")

    def take_requests(self, seconds: float = 0) -> list[Generate | Abort]:
        self.counts.signs += 1
        self._write_overdue()
        if seconds and self._requests.is_empty and not (self._arrived or self._controls):
            self._wait(seconds)
        self._read_records()
        taken, self._arrived = self._arrived, []
        return taken

    def _read_records(self) -> None:
        if self._requests.is_empty:
            return
        with self._lock:
            last = None
            for last in self._requests.waiting():
                self._read_record(last.kind, bytes(last.data))
            if last is not None:
                self._requests.take(last)

    def _read_record(self, kind: int, data: bytes) -> None:
        match kind:
            case PublisherRecord.GENERATE:
                generate = Generate.FromString(data)
                turn = turn_of(generate)
                self._open[generate.request_id] = _Open(generate.owner, turn.SerializeToString().hex() if turn else "")
                self._arrived.append(generate)
            case PublisherRecord.ABORT:
                self._arrived.append(Abort.FromString(data))
            case PublisherRecord.CONTROL:
                self._controls.append(Control.FromString(data))
            case PublisherRecord.ENDED:
                request_ids = np.frombuffer(data, np.uint64).tolist()
                self.active.end(request_ids)
                self._aborts.extend(request_ids)

    def take_aborts(self) -> list[int]:
        """Return the requests that the engine must abort because their rows could not be published."""
        self._read_records()
        aborts, self._aborts = self._aborts, []
        return aborts

    def take_controls(self) -> list[Control]:
        self._read_records()
        taken, self._controls = self._controls, []
        return taken

    # Methods for the requests that a new publisher must know.

    def _note_rows(self, number: int, request_ids: npt.NDArray[np.uint64], statuses: Host | None) -> None:
        """Note the requests that a batch begins or ends, as the publisher does when it publishes the batch."""
        rows = request_ids.tobytes(), b"" if statuses is None else statuses.tobytes()
        if rows == self._last_rows:  # most steps have the same rows as the step before
            return
        self._last_rows = rows
        for request_id in request_ids.tolist():
            self._open.setdefault(request_id, _Open())
        if statuses is not None and statuses.size == request_ids.size:
            with contextlib.suppress(IndexError):  # the publisher refuses unknown statuses
                leaving = LEAVES[statuses.reshape(-1)]
                if leaving.any():
                    ended = request_ids[leaving].tolist()
                    self.active.end(ended)
                    self._note_ended(number, ended)
        self._forget_ended()

    def _forget_ended(self) -> None:
        taken = self._steps.taken
        while self._ending and self._ending[0][0] <= taken:
            for request_id, request in self._ending.popleft()[1]:
                if self._open.get(request_id) is request:  # a later request may have the same id
                    del self._open[request_id]

    def _note_ended(self, number: int, request_ids: Collection[int]) -> None:
        if request_ids:
            self._ending.append((number, [(each, self._open[each]) for each in request_ids if each in self._open]))
            self._last_rows = _CHANGED

    def _ring_bell(self) -> None:
        if self.bell is not None:
            with contextlib.suppress(OSError):  # the socket's buffer is full of unread bytes, or the publisher died
                self.bell.send(WAKE)

    def _wait(self, seconds: float) -> None:
        """Block for at most `seconds` until the publisher has written or taken a record."""
        bell = self.bell
        if bell is None:
            self.has_publisher.wait(seconds)  # the publisher has not started
            return
        try:
            if not bell.recv(4096):
                self.has_publisher.wait(seconds)  # the publisher died
        except BlockingIOError:
            poll = select.poll()  # select would refuse descriptors above 1,023
            poll.register(bell, select.POLLIN)
            poll.poll(1000 * seconds)
        except OSError:
            self.has_publisher.wait(seconds)
