"""SharedMemoryPublisher: the engine's side, while there is no publisher yet."""

import os
import threading
from typing import Any

from tests.in_process.builders import settings
from tests.support.waiting import MOST
from tokenbus.worker import StepArrays
from tokenbus.worker.process import arrays
from tokenbus.worker.process.memory import SharedMemory, shared_file
from tokenbus.worker.process.records import EngineRecord
from tokenbus.worker.process.shared_memory_publisher import SharedMemoryPublisher
from tokenbus_contracts import BatchKind


class Starting(threading.Event):
    """A publisher that has taken what was handed over when it is waited for."""

    def __init__(self, memory: SharedMemory) -> None:
        super().__init__()
        self.memory = memory
        self.waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        del timeout
        self.waits += 1
        for record in self.memory.steps.waiting():
            self.memory.steps.take(record)
        return True


def test_word_that_finds_no_room_is_handed_over_later() -> None:
    """That it takes no more is heard once the publisher has made room, and no second publisher is needed for it."""
    given = settings({"worker.handover_items": 4})
    file = shared_file(given)
    of_engine, of_publisher = SharedMemory(file, given), SharedMemory(file, given)
    publisher = SharedMemoryPublisher(given, of_engine, epoch=7)
    publisher.is_running = True
    for key in range(1, 5):
        publisher.admitted(key, 1)
    publisher.take_no_more()
    for record in list(of_publisher.steps.waiting()):
        of_publisher.steps.take(record)
    assert not publisher.take_requests()
    assert not publisher.take_requests()
    assert [record.kind for record in of_publisher.steps.waiting()] == [EngineRecord.NO_MORE]
    os.close(file)


def test_last_word_waits_for_a_publisher_that_starts() -> None:
    """Where the memory is full before the first publisher is there, the engine's thread sleeps until it is."""
    given = settings({"worker.handover_items": 4})
    file = shared_file(given)
    of_engine, of_publisher = SharedMemory(file, given), SharedMemory(file, given)
    publisher = SharedMemoryPublisher(given, of_engine, epoch=7)
    publisher.is_running, publisher.has_publisher = True, Starting(of_publisher)
    for key in range(1, 5):
        publisher.admitted(key, 1)
    publisher.leave(MOST)
    assert publisher.has_publisher.waits == 1
    os.close(file)


def test_steps_are_numbered_before_a_publisher_takes_them() -> None:
    given = settings()
    file = shared_file(given)
    memory = SharedMemory(file, given)
    publisher = SharedMemoryPublisher(given, memory, epoch=7)
    publisher.is_running = True
    for kind, step in (("TARGET", 0), ("DRAFT", 0), ("TARGET", 0), ("TARGET", 9), ("DRAFT", 0), ("TARGET", 0)):
        rows: dict[str, Any] = {"request_ids": [1], "positions": [0], "token_counts": [1], "token_ids": [5]}
        publisher.emit(StepArrays(**rows, kind=BatchKind[kind], step=step))
    assert [arrays.read(record.data).step for record in memory.steps.waiting()] == [1, 1, 2, 9, 9, 10]
    os.close(file)
