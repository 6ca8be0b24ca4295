"""Handover: the engine's side, while there is no publisher yet."""

import os
import threading

from tests.services.builders import settings
from tests.support.waiting import MOST
from tokenbus_services.worker.process.handover import Handover
from tokenbus_services.worker.process.memory import SharedMemory, shared_file


class Starting(threading.Event):
    """A publisher that has taken what was handed over when it is waited for."""

    def __init__(self, memory: SharedMemory) -> None:
        super().__init__()
        self.memory = memory
        self.waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        """Take what waits."""
        del timeout
        self.waits += 1
        for record in self.memory.steps.waiting():
            self.memory.steps.take(record)
        return True


def test_last_word_waits_for_a_publisher_that_starts() -> None:
    """Where the memory is full before the first publisher is there, the engine's thread sleeps until it is."""
    given = settings({"worker.handover_items": 4})
    file = shared_file(given)
    of_engine, of_publisher = SharedMemory(file, given), SharedMemory(file, given)
    handover = Handover(given, of_engine, epoch=7)
    handover.is_running, handover.has_publisher = True, Starting(of_publisher)
    for key in range(1, 5):
        handover.admitted(key, 1)
    handover.leave(MOST)
    assert handover.has_publisher.waits == 1
    os.close(file)
