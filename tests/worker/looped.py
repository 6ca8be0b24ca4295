"""An engine's loop over a publisher without a link, one turn at a time."""

import threading
from collections.abc import Sequence
from typing import Generic, TypeVar

from tests.in_process.builders import EPOCH, arrays_of, settings
from tokenbus.testing import ManualClock
from tokenbus.worker import Engine as AnyEngine
from tokenbus.worker import Publisher, StepArrays
from tokenbus.worker.engine_loop import EngineLoop
from tokenbus.worker.engine_publisher import EnginePublisher
from tokenbus.worker.retention import Retained
from tokenbus_contracts import LogprobBatch, decode
from tokenbus_contracts.frames import read_frame
from tokenbus_contracts.generated.request_pb2 import Abort, Generate, RequestEvent

E = TypeVar("E", bound=AnyEngine)


class Engine:
    vocabulary_size = 0

    def __init__(self, *steps: Sequence[LogprobBatch] | Exception) -> None:
        self.steps = list(steps)
        self.admitted: list[int] = []
        self.aborted: list[int] = []
        self.refusal: Exception | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.steps)

    def admit(self, generate: Generate) -> int:
        if self.refusal is not None:
            raise self.refusal
        self.admitted.append(generate.request_id)
        return 3

    def abort(self, key: int) -> None:
        self.aborted.append(key)

    def step(self) -> Sequence[StepArrays]:
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return list(map(arrays_of, step))

    def close(self) -> None:
        """Have nothing to let go of."""


class Once(threading.Event):
    def __init__(self, turns: int = 1) -> None:
        super().__init__()
        self.turns = turns

    def is_set(self) -> bool:
        self.turns -= 1
        return self.turns < 0


def running(*, items: int = 100, tp_rank: int = 0, requests: Sequence[Generate | Abort] = ()) -> Publisher:
    chosen = settings({"worker.retention_items": items, "worker.policy": "fail", "worker.tp_rank": tp_rank})
    publisher = Publisher(chosen, epoch=EPOCH)
    publisher.begin()
    for request in requests:
        publisher.incoming.put(request)
    return publisher


def events(publisher: Publisher) -> list[RequestEvent]:
    kept = [entry for entry in publisher.retention if isinstance(entry, Retained)]
    return [read_frame(RequestEvent, entry.payload) for entry in kept if entry.kind == 2]


def keys(publisher: Publisher) -> list[list[int]]:
    return [made.request_ids.tolist() for made in batches(publisher)]


def batches(publisher: Publisher) -> list[LogprobBatch]:
    kept = [entry for entry in publisher.retention if isinstance(entry, Retained)]
    return [decode(entry.payload) for entry in kept if entry.kind == 1]


class Looped(Generic[E]):
    def __init__(self, engine: E) -> None:
        self.engine, self.clock = engine, ManualClock()
        self.publisher = running(items=100_000)
        self.engine_publisher = EnginePublisher(self.publisher, engine.vocabulary_size)
        self.loop = EngineLoop(engine, self.engine_publisher, unix_ms=self.clock.unix_ms)

    def turn(self, *requests: Generate | Abort) -> None:
        for request in requests:
            self.publisher.incoming.put(request)
        self.loop.serve(Once())

    def finish(self) -> None:
        for _ in range(5000):
            if not self.engine.has_work:
                return
            self.turn()
        raise AssertionError("it does not end")

    def errors(self) -> dict[int, tuple[int, str]]:
        found = [event.error for event in events(self.publisher) if event.HasField("error")]
        assert len({error.request_id for error in found}) == len(found)
        return {error.request_id: (error.code, error.message) for error in found}

    def tokens(self, key: int) -> list[int]:
        found: list[int] = []
        for made in batches(self.publisher):
            for row in made.rows():
                if row.request_id == key:
                    assert row.position == len(found)
                    found += row.token_ids.tolist()
        return found
