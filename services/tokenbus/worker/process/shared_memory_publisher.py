"""SharedMemoryPublisher: what an engine hands to a publisher in another process, and takes from it."""

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from tokenbus.delivery.errors import brief
from tokenbus.delivery.step import LEAVES
from tokenbus.settings import Settings
from tokenbus.worker.active import ActiveRequests
from tokenbus.worker.errors import NotRunningError
from tokenbus.worker.process import arrays
from tokenbus.worker.process.memory import SharedMemory
from tokenbus.worker.process.records import (
    ADMITTED,
    FAILED,
    IDS,
    UNKNOWN,
    WAKE,
    EngineRecord,
    PublisherRecord,
    SharedCounts,
)
from tokenbus.worker.process.ring import RECORD_BYTES
from tokenbus.worker.ragged import Host, request_ids_of
from tokenbus.worker.step import StepArrays
from tokenbus_contracts import BatchKind, ContractError
from tokenbus_contracts.generated.control_pb2 import Control, ControlAnswer
from tokenbus_contracts.generated.request_pb2 import Abort, ErrorCode, Generate, Prefilled, PromptScoresChunk

_NO_KEYS = np.zeros(0, np.uint64)
_ANOTHER = (b"", b"")
_MOST_LOST = 65_536
"""As many requests as a gap may name."""
_POLL_SECONDS = 0.05
"""After how long it looks again for room: the publisher, which would wake it, may have died."""


class SharedMemoryPublisher:
    """The engine's side of the memory that it shares with a publisher's process.

    What is handed over is copied once. One thread, the engine's, uses this, but for `take_no_more` and `leave`.
    """

    def __init__(self, settings: Settings, memory: SharedMemory, epoch: int) -> None:
        self.settings, self.epoch = settings, epoch
        self.active = ActiveRequests()
        self.counts = SharedCounts(memory.words)
        self.bell: socket.socket | None = None
        """The socket to the publisher that there is now."""
        self.has_publisher = threading.Event()
        """Set while there is one."""
        self.is_running = False
        """Whether it takes what is handed over."""
        self._steps, self._requests = memory.steps, memory.requests
        self._lock = threading.Lock()
        """Guards what is handed over, and which requests the next publisher must know."""
        self._open: dict[int, list[int]] = {}
        """The owners of the requests that the bus has a row of, or will: those that ended, until that is published."""
        self._ending: deque[tuple[int, list[tuple[int, list[int]]]]] = deque()
        """The requests that ended, with the record after which they are published."""
        self._last_step = 0
        self._last_rows = _ANOTHER
        """The ids and statuses of the last step, if all of its requests go on: most steps are as the one before."""
        self._arrived: list[Generate | Abort] = []
        """The requests and aborts that were read from the memory, and not taken."""
        self._controls: list[Control] = []
        self._aborts: deque[int] = deque()
        self._lost: set[int] = set()
        """The requests of what found no room, which the bus has not heard of yet."""
        self._has_lost_all = False
        """Whether they were too many to name: all of them end."""
        self._engine_state = ""
        self._takes_no_more = self._leaves = False
        self._owes_no_more = False
        """Whether that it takes no more has found no room yet."""

    def state(self) -> dict[str, object]:
        """Return what a new publisher must know, beside what is in the memory."""
        with self._lock:
            self._let_go_of_ended()
            return {
                "requests": [(key, owner) for key, (owner,) in self._open.items()],
                "requests_tail": self._requests.tail,
                "takes_no_more": self._takes_no_more,
                "leaves": self._leaves,
                "engine_state": self._engine_state,
            }

    # What the engine hands over.

    def admitted(self, key: int, prompt_tokens: int, cached_tokens: int | None = None) -> None:
        """Hand over that the engine admitted a request."""
        cached = UNKNOWN if cached_tokens is None else cached_tokens
        self._hand_over(EngineRecord.ADMITTED, ADMITTED.pack(key, prompt_tokens, cached), (key,))

    def scored(self, chunk: PromptScoresChunk) -> None:
        """Hand over what the engine says of some of a prompt's tokens."""
        self._hand_over(EngineRecord.SCORED, chunk.SerializeToString(), (chunk.request_id,))

    def prefilled(self, prefilled: Prefilled) -> None:
        """Hand over a request's transfer state."""
        self._hand_over(EngineRecord.PREFILLED, prefilled.SerializeToString(), (prefilled.request_id,))

    def controlled(self, answer: ControlAnswer) -> None:
        """Hand over what became of a command; a later publisher's hello says how the engine is since."""
        if answer.HasField("state"):
            self._engine_state = answer.state.SerializeToString().hex()
        self._hand_over(EngineRecord.CONTROLLED, answer.SerializeToString(), ())

    def failed(self, key: int, code: ErrorCode, message: str) -> None:
        """Hand over that a request ended with an error."""
        self.active.end([key])
        self._hand_over(
            EngineRecord.FAILED, FAILED.pack(key, code) + brief(message, code).encode(), (key,), ends=(key,)
        )

    def emit(self, step: StepArrays) -> None:
        """Hand over one batch of a step; the engine may reuse its arrays when this returns."""
        self._check_running()
        self.counts.signs += 1
        try:
            found = arrays.hosted(step, self.settings.worker.handover_bytes)
        except ContractError as error:
            self._refuse(step, error)
            return
        keys = request_ids_of(found.arrays[0][1])
        if not self._has_room(found.size + RECORD_BYTES):  # and for a word that another thread may put between
            self._lose(keys.tolist())
            return
        with self._lock:
            arrays.write(step, self._number(step), found, self._steps.room(found.size))
            number = self._steps.commit(EngineRecord.STEP, found.size)
            if step.kind is BatchKind.TARGET:
                self._note_rows(number, keys, found.get("statuses"))
        self._ring_bell()

    def _number(self, step: StepArrays) -> int:
        """Number a step that has no number as an assembler does, but here: it outlives each publisher."""
        number = step.step or self._last_step + (step.kind is BatchKind.TARGET) or 1
        self._last_step = max(self._last_step, number)
        return number

    def _refuse(self, step: StepArrays, error: ContractError) -> None:
        """Hand over why a step's arrays are none: its requests end."""
        try:
            keys = request_ids_of(step.request_ids)
        except ContractError:
            keys = _NO_KEYS
        message = str(error).encode()
        self._hand_over(EngineRecord.REFUSED, IDS.pack(keys.size) + keys.tobytes() + message, keys.tolist())

    def take_no_more(self) -> None:
        """Tell the processor that this worker finishes its requests and takes no new one."""
        with self._lock:
            self._takes_no_more = self._owes_no_more = True
        self._say_what_waits()
        self._ring_bell()

    def leave(self, seconds: float) -> None:
        """Hand nothing more over; say so once there is room, for which this waits at most so many seconds.

        Where there is none, the next publisher's state says it.
        """
        with self._lock:
            self.is_running, self._leaves = False, True
        deadline = time.monotonic() + seconds
        while True:
            self._say_what_waits()
            with self._lock:
                if has_room := self._steps.has_room(0):
                    self._steps.put(EngineRecord.LEAVE)
            if has_room or time.monotonic() >= deadline:
                break
            self._wait(_POLL_SECONDS)
        self._ring_bell()

    def flush(self, seconds: float) -> None:
        """Block until all that was handed over is published, for at most so many seconds."""
        deadline = time.monotonic() + seconds
        self._say_what_waits()
        while len(self._steps) and (left := deadline - time.monotonic()) > 0:
            self._wait(min(left, _POLL_SECONDS))

    def _hand_over(self, kind: EngineRecord, data: bytes, keys: Collection[int], ends: Collection[int] = ()) -> None:
        self._check_running()
        self.counts.signs += 1
        if not self._has_room(len(data)):
            self._lose(keys)
            return
        with self._lock:
            number = self._steps.put(kind, data)
            self._note_ended(number, ends)
        self._ring_bell()

    def _has_room(self, size: int) -> bool:
        """Tell whether there is room for a record, if need be after a wait for it, as the policy says."""
        if self._has_said_all and self._steps.has_room(size):
            return True
        worker = self.settings.worker
        deadline = time.monotonic() + (0 if worker.policy == "fail" else worker.block_timeout_ms / 1000)
        while True:
            self._say_what_waits()
            if self._has_said_all and self._steps.has_room(size):
                return True
            if time.monotonic() >= deadline:
                return False
            self._check_running()
            self._wait(_POLL_SECONDS)

    @property
    def _has_said_all(self) -> bool:
        return not (self._lost or self._has_lost_all or self._owes_no_more)

    def _lose(self, keys: Iterable[int]) -> None:
        """End the requests of what found no room: the next that does names them."""
        lost = list(keys)
        with self._lock:
            self._lost.update(lost)
            if len(self._lost) > _MOST_LOST:
                self._has_lost_all = True
                self._lost.clear()
        self.active.end(lost)
        self._aborts.extend(lost)

    def _say_what_waits(self) -> None:
        """Hand over that it takes no more, and which requests lost rows, as far as there is room for it."""
        if self._has_said_all:
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

    # What comes for the engine.

    def take_requests(self, seconds: float = 0) -> list[Generate | Abort]:
        """Return the requests and aborts that came since the last call; block for at most so many seconds for some."""
        self.counts.signs += 1
        self._say_what_waits()
        if seconds and self._requests.is_empty and not (self._arrived or self._controls):
            self._wait(seconds)
        self._take_brought()
        found, self._arrived = self._arrived, []
        return found

    def _take_brought(self) -> None:
        """Take what the publisher has brought out of the memory."""
        if self._requests.is_empty:
            return
        with self._lock:
            last = None
            for last in self._requests.waiting():
                self._take(last.kind, bytes(last.data))
            if last is not None:
                self._requests.take(last)

    def _take(self, kind: int, data: bytes) -> None:
        match kind:
            case PublisherRecord.GENERATE:
                generate = Generate.FromString(data)
                self._open[generate.request_id] = [generate.owner]
                self._arrived.append(generate)
            case PublisherRecord.ABORT:
                self._arrived.append(Abort.FromString(data))
            case PublisherRecord.CONTROL:
                self._controls.append(Control.FromString(data))
            case PublisherRecord.ENDED:
                keys = np.frombuffer(data, np.uint64).tolist()
                self.active.end(keys)
                self._aborts.extend(keys)

    def take_aborts(self) -> list[int]:
        """Return the requests that ended because their rows could not be published: the engine is to end them too."""
        self._take_brought()
        aborts = []
        while self._aborts:
            aborts.append(self._aborts.popleft())
        return aborts

    def take_controls(self) -> list[Control]:
        """Return operators' commands that came since the last call, in their order; one may come twice."""
        self._take_brought()
        found, self._controls = self._controls, []
        return found

    # Which requests a new publisher must know.

    def _note_rows(self, number: int, keys: npt.NDArray[np.uint64], statuses: Host | None) -> None:
        """Note the requests of a batch, and those that it ends, as the publisher does when it publishes it."""
        rows = keys.tobytes(), b"" if statuses is None else statuses.tobytes()
        if rows == self._last_rows:
            return
        self._last_rows = rows
        for key in keys.tolist():
            self._open.setdefault(key, [0])
        if statuses is not None and statuses.size == keys.size:
            with contextlib.suppress(IndexError):  # a status that there is none of is the publisher's to refuse
                leaving = LEAVES[statuses.reshape(-1)]
                if leaving.any():
                    ended = keys[leaving].tolist()
                    self.active.end(ended)
                    self._note_ended(number, ended)
        self._let_go_of_ended()

    def _let_go_of_ended(self) -> None:
        taken = self._steps.taken
        while self._ending and self._ending[0][0] <= taken:
            for key, request in self._ending.popleft()[1]:
                if self._open.get(key) is request:  # and not a later one of the same id
                    del self._open[key]

    def _note_ended(self, number: int, keys: Collection[int]) -> None:
        if keys:
            self._ending.append((number, [(key, self._open[key]) for key in keys if key in self._open]))
            self._last_rows = _ANOTHER

    # Waking each other.

    def _ring_bell(self) -> None:
        """Tell the publisher that something was handed over."""
        if self.bell is not None:
            with contextlib.suppress(OSError):  # it has many bells to hear, or it died
                self.bell.send(WAKE)

    def _wait(self, seconds: float) -> None:
        """Block until the publisher has brought or taken something, for at most so many seconds."""
        bell = self.bell
        if bell is None:
            self.has_publisher.wait(seconds)  # it has not started
            return
        try:
            if not bell.recv(4096):
                self.has_publisher.wait(seconds)  # it died
        except BlockingIOError:
            poll = select.poll()  # and not select, which knows no file above 1,024
            poll.register(bell, select.POLLIN)
            poll.poll(1000 * seconds)
        except OSError:
            self.has_publisher.wait(seconds)
