"""PublisherThread: runs an EnginePublisher in a thread of its own, so that the engine's thread only copies arrays."""

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import fields

import numpy as np

from tokenbus.logs import logger
from tokenbus.worker.engine_publisher import EnginePublisher
from tokenbus.worker.errors import NotRunningError
from tokenbus.worker.ragged import on_host
from tokenbus.worker.step import ARRAYS, StepArrays
from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.control_pb2 import ControlAnswer
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Prefilled, PromptScoresChunk

_log = logger("worker")
_OTHERS = [each.name for each in fields(StepArrays) if each.name not in ARRAYS]


class PublisherThread:
    """Queues an engine's batches and events, and has an EnginePublisher publish them in order, while `with` lasts.

    The queue is bounded: the engine's thread blocks while it is full, as it would for room in retention. After an
    error of the publisher every call raises that error.
    """

    def __init__(self, publisher: EnginePublisher, most: int) -> None:
        self._publisher = publisher
        # queue.Queue, which has a bound, costs the engine's thread several times as much for each step.
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._most = most
        self._room = threading.Condition()
        self._is_waited_for = False
        self._error: Exception | None = None
        # A daemon, so that a process may end without leaving `with`; leaving it waits for the thread.
        self._thread = threading.Thread(target=self._run, name="tokenbus-publisher", daemon=True)

    def __enter__(self) -> "PublisherThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.put(None)
        self._thread.join()

    def flush(self, seconds: float) -> None:
        """Block until all that was queued is published, for at most so many seconds."""
        done = threading.Event()
        self._put(done.set)
        done.wait(seconds)

    def admitted(self, key: int, prompt_tokens: int, cached_tokens: int | None = None) -> None:
        """Queue the event that the engine admitted a request."""
        self._put(lambda: self._publisher.admitted(key, prompt_tokens, cached_tokens))

    def scored(self, chunk: PromptScoresChunk) -> None:
        """Queue what the engine says of some of a prompt's tokens."""
        self._put(lambda: self._publisher.scored(chunk))

    def prefilled(self, prefilled: Prefilled) -> None:
        """Queue a request's transfer state."""
        self._put(lambda: self._publisher.prefilled(prefilled))

    def controlled(self, answer: ControlAnswer) -> None:
        """Queue what became of a command."""
        self._put(lambda: self._publisher.controlled(answer))

    def failed(self, key: int, code: ErrorCode, message: str) -> None:
        """Queue the event that a request ended with an error."""
        self._put(lambda: self._publisher.failed(key, code, message))

    def emit(self, arrays: StepArrays) -> None:
        """Queue one batch of a step; the engine may reuse its arrays when this returns."""
        copied = _copied(arrays)
        self._put(lambda: self._publisher.emit(copied))

    def _put(self, task: Callable[[], None]) -> None:
        if self._waiting.qsize() >= self._most:
            self._wait_for_room()
        if self._error is not None:
            raise self._error
        self._waiting.put(task)

    def _wait_for_room(self) -> None:
        with self._room:
            self._is_waited_for = True
            self._room.wait_for(lambda: self._error is not None or self._waiting.qsize() < self._most)
            self._is_waited_for = False

    def _run(self) -> None:
        while (task := self._waiting.get()) is not None:
            if self._is_waited_for:
                with self._room:
                    self._room.notify()
            if self._error is not None:
                continue  # drop what is queued, so that the engine's thread does not block for room
            try:
                task()
            except NotRunningError as error:
                self._error = error
            except Exception as error:  # noqa: BLE001 - a defect of ours, which the engine's thread raises
                _log.exception("a step was not published")
                self._error = error
        self._error = self._error or NotRunningError("the publisher's thread was closed")
        with self._room:  # a thread that waits for room raises the error
            self._room.notify()


def _copied(arrays: StepArrays) -> StepArrays:
    copy = object.__new__(StepArrays)  # copy.copy() takes longer than all that follows
    for name in _OTHERS:
        setattr(copy, name, getattr(arrays, name))
    for name in ARRAYS:
        values = getattr(arrays, name)
        if type(values) is np.ndarray:
            values = values.copy()
        elif values is not None:
            # The publisher refuses what cannot become an array, as it does all else.
            with contextlib.suppress(ContractError):
                values = np.array(on_host(name, values))
        setattr(copy, name, values)
    return copy
