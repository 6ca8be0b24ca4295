"""How a worker that is asked to stop ends."""

from collections.abc import Sequence

from tests.in_process.builders import generate_of
from tests.worker.looped import Engine, batches, events, running
from tokenbus.testing import ManualClock, batch, row_shapes
from tokenbus.worker import Publisher, StepArrays
from tokenbus.worker.engine_loop import EngineLoop
from tokenbus.worker.engine_publisher import EnginePublisher
from tokenbus_contracts.generated.request_pb2 import Abort, ErrorCode


class Timed(Engine):
    """An engine with work for five steps, each of which takes a second."""

    def __init__(self, publisher: Publisher, *, is_asked: bool = False) -> None:
        super().__init__(*([batch(row_shapes([3], position=place), step=place + 1)] for place in range(5)))
        self.publisher, self.is_asked, self.clock = publisher, is_asked, ManualClock()

    def step(self) -> Sequence[StepArrays]:
        self.clock.advance(1)
        if self.is_asked:
            self.publisher.incoming.put(generate_of(9))
        return super().step()


def finished(engine: Timed, seconds: float = 100) -> int:
    EngineLoop(engine, EnginePublisher(engine.publisher, engine.vocabulary_size)).finish(seconds, engine.clock.now)
    return len(engine.steps)


def test_nothing_new_is_taken() -> None:
    publisher = running(requests=[generate_of(7), Abort(request_id=8)])
    engine = Timed(publisher, is_asked=True)
    assert finished(engine) == 0
    assert (engine.admitted, engine.aborted) == ([], [8])
    said = {(event.error.request_id, event.error.code, event.error.message) for event in events(publisher)}
    assert said == {(key, ErrorCode.ERROR_CODE_OVERLOADED, "the worker is stopping") for key in (7, 9)}


def test_everything_is_finished_within_a_time() -> None:
    publisher = running()
    assert finished(Timed(publisher)) == 0
    assert len(batches(publisher)) == 5
    assert finished(Timed(running()), seconds=3) == 2
    assert finished(Timed(running()), seconds=0) == 5


def test_closed_publisher_ends_it() -> None:
    publisher = running()
    publisher.end()
    assert finished(Timed(publisher)) == 4
