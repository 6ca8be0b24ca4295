"""PublisherThread: publishes what an engine says in its order, and tells the engine of an error."""

import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from tests.in_process.builders import arrays_of, generate_of
from tests.support.waiting import MOST
from tests.worker.looped import running
from tokenbus.testing import batch, row_shapes
from tokenbus.worker import NotRunningError, Publisher, StepArrays
from tokenbus.worker.engine_publisher import EnginePublisher
from tokenbus.worker.publisher_thread import PublisherThread
from tokenbus.worker.retention import Retained
from tokenbus_contracts import decode
from tokenbus_contracts.frames import read_frame
from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestEvent


def said(publisher: Publisher) -> list[Any]:
    kept = [entry for entry in publisher.retention if isinstance(entry, Retained)]
    return [
        decode(entry.payload).token_ids.tolist()
        if entry.kind == 1
        else read_frame(RequestEvent, entry.payload).WhichOneof("event")
        for entry in kept
    ]


class Gated:
    """A publisher that waits until it may go on, and may fail."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.began = threading.Event()
        self.emitted: list[list[int]] = []
        self.errors: list[Exception] = []

    def emit(self, arrays: StepArrays) -> None:
        self.began.set()
        assert self.gate.wait(MOST)
        if self.errors:
            raise self.errors.pop(0)
        self.emitted.append(np.asarray(arrays.token_ids).tolist())

    def thread(self, most: int = 8) -> PublisherThread:
        return PublisherThread(cast("EnginePublisher", self), most)


def step(*ids: int) -> StepArrays:
    return StepArrays(request_ids=[7], positions=[0], token_counts=[len(ids)], token_ids=np.array(ids))


def test_everything_is_published_in_order() -> None:
    publisher = running()
    with PublisherThread(EnginePublisher(publisher, 0), 8) as thread:
        thread.admitted(8, 3)
        thread.emit(arrays_of(batch(row_shapes([8]))))
        thread.failed(8, ErrorCode.ERROR_CODE_ENGINE, "no")
        thread.emit(arrays_of(batch(row_shapes([9]), step=2)))
        thread.flush(MOST)
        ids = [batch(row_shapes([key])).token_ids.tolist() for key in (8, 9)]
        assert said(publisher) == ["admitted", ids[0], "error", ids[1]]


def test_engine_may_use_its_arrays_again() -> None:
    """What the engine writes into its arrays after it handed them over is not in the batch (case 12)."""
    gated = Gated()
    with gated.thread() as thread:
        mine = step(1, 2)
        thread.emit(mine)
        mine.token_ids[:] = 9
        gated.gate.set()
    assert gated.emitted == [[1, 2]]


def test_engine_waits_when_too_much_is_not_published() -> None:
    """No more batches wait than may: the engine's thread waits for room, and goes on when there is some (case 20)."""
    gated, passed, handed = Gated(), threading.Event(), list[int]()

    def engine() -> None:
        assert gated.began.wait(MOST)
        for number in range(1, 4):
            thread.emit(step(number))
            handed.append(number)
        passed.set()

    with gated.thread(most=2) as thread:
        other = threading.Thread(target=engine)
        other.start()
        thread.emit(step(0))
        while not (thread._engine_waits or passed.is_set()):
            threading.Event().wait(0.001)
        assert handed == [1, 2]
        gated.gate.set()
        other.join(MOST)
        assert passed.is_set()
    assert gated.emitted == [[0], [1], [2], [3]]


@pytest.mark.parametrize("error", [NotRunningError("closed"), OSError("a defect")])
def test_engine_learns_that_nothing_is_published_any_more(error: Exception) -> None:
    gated = Gated()
    gated.errors.append(error)
    says: list[Callable[[], None]] = [
        lambda: thread.emit(step(2)),
        lambda: thread.admitted(7, 1),
        lambda: thread.failed(7, ErrorCode.ERROR_CODE_ENGINE, "no"),
        lambda: thread.flush(MOST),
    ]
    with gated.thread(most=2) as thread:
        thread.emit(step(1))
        assert gated.began.wait(MOST)
        thread.emit(step(1))
        gated.gate.set()
        while thread._error is None:
            threading.Event().wait(0.001)
        for say in says:
            with pytest.raises(type(error)):
                say()
    assert gated.emitted == []


def test_what_is_no_array_is_refused_where_all_else_is() -> None:
    publisher = running()
    engine_publisher = EnginePublisher(publisher, 0)
    engine_publisher.active.add(generate_of(7))
    with PublisherThread(engine_publisher, 8) as thread:
        thread.emit(StepArrays(request_ids=[7], positions=[0], token_counts=[1], token_ids=[[1], [2, 3]]))
        thread.flush(MOST)
        assert said(publisher) == ["error"]
        assert engine_publisher.take_aborts() == [7]
        assert engine_publisher.active.end_all() == []
