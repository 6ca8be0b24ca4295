"""How a worker that is asked to stop ends."""

from collections import deque
from collections.abc import Sequence
from typing import cast

from tests.services.builders import settings
from tests.support.clock import ManualClock
from tokenbus_contracts import LogprobBatch
from tokenbus_contracts.generated.request_pb2 import Abort, ErrorCode, Generate
from tokenbus_services.worker import NotRunningError, Publisher, RetentionFullError, StepArrays
from tokenbus_services.worker.emitter import Emitter
from tokenbus_services.worker.engine_loop import EngineLoop
from tokenbus_services.worker.publisher import ReceivedHandoff

STEP = StepArrays(request_keys=[3], positions=[0], token_counts=[1], token_ids=[5])


class Outlet:
    """A stand-in for a publisher that records the calls it gets."""

    def __init__(self, *arriving: Generate | Abort) -> None:
        self.settings = settings()
        self.arriving = deque(arriving)
        self.published = 0
        self.refused: list[tuple[int, ErrorCode]] = []
        self.error: Exception | None = None

    def take_requests(self) -> list[Generate | Abort]:
        return [self.arriving.popleft()] if self.arriving else []

    def take_handoffs(self) -> list[ReceivedHandoff]:
        return []

    def publish(self, batch: LogprobBatch) -> None:
        assert batch.token_ids.tolist() == [5]
        error, self.error = self.error, None
        if error is not None:
            raise error
        self.published += 1

    def failed_request(self, key: int, code: ErrorCode, message: str) -> None:
        assert message == "the worker is stopping"
        self.refused.append((key, code))


class Countdown:
    """An engine that has work for some steps, each of which takes a second."""

    vocabulary_size = 8

    def __init__(self, steps: int, clock: ManualClock) -> None:
        self.left = steps
        self.aborted: list[int] = []
        self.clock = clock

    @property
    def has_work(self) -> bool:
        return self.left > 0

    def admit(self, generate: Generate, state: bytes | None = None) -> int:
        raise AssertionError(generate, state)

    def abort(self, key: int) -> None:
        self.aborted.append(key)

    def step(self) -> Sequence[StepArrays]:
        self.left -= 1
        self.clock.advance(1)
        return [STEP]

    def close(self) -> None:
        """Have nothing to let go of."""


def finished(outlet: Outlet, steps: int, seconds: float = 100) -> Countdown:
    clock = ManualClock()
    engine = Countdown(steps, clock)
    EngineLoop(engine, Emitter(cast("Publisher", outlet), engine.vocabulary_size)).finish(seconds, clock.now)
    return engine


def test_everything_is_finished() -> None:
    outlet = Outlet()
    assert finished(outlet, 5).left == 0
    assert outlet.published == 5


def test_nothing_new_is_taken() -> None:
    """A request that comes now ends with an error that says why, and an abort still ends another."""
    outlet = Outlet(Generate(request_key=7), Abort(request_key=8), Generate(request_key=9))
    assert finished(outlet, 2).aborted == [8]
    assert outlet.refused == [(7, ErrorCode.ERROR_CODE_OVERLOADED), (9, ErrorCode.ERROR_CODE_OVERLOADED)]


def test_time_is_bounded() -> None:
    assert finished(Outlet(), 5, seconds=3).left == 2
    assert finished(Outlet(), 5, seconds=0).left == 5


def test_closed_publisher_ends_it() -> None:
    outlet = Outlet()
    outlet.error = NotRunningError("closed")
    assert finished(outlet, 5).left == 4


def test_requests_without_room_are_aborted() -> None:
    """Requests whose batch found no room are ended in the engine too, and the others go on."""
    outlet = Outlet()
    outlet.error = RetentionFullError([3], 1, 1, "policy fail")
    engine = finished(outlet, 5)
    assert (engine.left, engine.aborted, outlet.published) == (0, [3], 4)
