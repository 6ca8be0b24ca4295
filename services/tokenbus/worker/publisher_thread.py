"""PublisherThread: publishes in the background, so that the engine's thread only copies arrays."""

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import fields

import numpy as np

from tokenbus.logs import logger
from tokenbus.worker.engine_output import EngineOutput
from tokenbus.worker.engine_publisher import EnginePublisher
from tokenbus.worker.errors import NotRunningError
from tokenbus.worker.ragged import on_host
from tokenbus.worker.step import ARRAYS, StepArrays
from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.request_pb2 import RequestEvent

_log = logger("worker")
_OTHER_FIELDS = [each.name for each in fields(StepArrays) if each.name not in ARRAYS]


class PublisherThread(EngineOutput):
    """Queues an engine's steps and events within `with`, and publishes them in order on a background thread.

    The queue is bounded, so the engine's thread blocks while the queue is full. After an error of the publisher, every
    call raises that error.
    """

    def __init__(self, publisher: EnginePublisher, most: int) -> None:
        self._publisher = publisher
        # A bounded queue.Queue would cost the engine's thread several times as much for each step.
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._most = most
        self._room = threading.Condition()
        self._engine_waits = False
        self._error: Exception | None = None
        # With a daemon thread, the process can end without leaving `with`.
        self._thread = threading.Thread(target=self._run, name="tokenbus-publisher", daemon=True)

    def __enter__(self) -> "PublisherThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.put(None)
        self._thread.join()

    def flush(self, seconds: float) -> None:
        """Block for at most `seconds` until everything in the queue is published."""
        done = threading.Event()
        self._put(done.set)
        done.wait(seconds)

    def publish_event(self, event: RequestEvent) -> None:
        self._put(lambda: self._publisher.publish_event(event))

    def emit(self, arrays: StepArrays) -> None:
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
            self._engine_waits = True
            self._room.wait_for(lambda: self._error is not None or self._waiting.qsize() < self._most)
            self._engine_waits = False

    def _run(self) -> None:
        while (task := self._waiting.get()) is not None:
            if self._engine_waits:
                with self._room:
                    self._room.notify()
            if self._error is not None:
                continue  # discard tasks, so that the engine's thread does not block
            try:
                task()
            except NotRunningError as error:
                self._error = error
            except Exception as error:  # noqa: BLE001 - a defect of ours, which the engine's thread raises
                _log.exception("a step was not published")
                self._error = error
        self._error = self._error or NotRunningError("the publisher's thread was closed")
        with self._room:  # an engine's thread that waits for a full queue must raise the error
            self._room.notify()


def _copied(arrays: StepArrays) -> StepArrays:
    copy = object.__new__(StepArrays)  # copy.copy() takes longer than the rest of this function
    for name in _OTHER_FIELDS:
        setattr(copy, name, getattr(arrays, name))
    for name in ARRAYS:
        values = getattr(arrays, name)
        if type(values) is np.ndarray:
            values = values.copy()
        elif values is not None:
            # EnginePublisher refuses values that cannot become an array.
            with contextlib.suppress(ContractError):
                values = np.array(on_host(name, values))
        setattr(copy, name, values)
    return copy
