"""What times are counted with, and how an event loop is watched."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from tests.metrics.test_speculation import rows
from tokenbus.delivery import PendingAck, Step
from tokenbus.metrics.families import Histogram
from tokenbus.metrics.processor import StepTimes
from tokenbus.metrics.server import LoopWatch
from tokenbus.testing import ManualClock


def test_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    assert histogram.buckets() == [("0.1", 2.0), ("1.0", 3.0), ("+Inf", 4.0)]
    assert histogram.count == 4
    assert histogram.sum == pytest.approx(7.65)


class SlowLoop:
    def __init__(self) -> None:
        self.asked: list[Callable[[], None]] = []
        self.is_closed = False

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        if self.is_closed:
            raise RuntimeError("Event loop is closed")
        self.asked.append(call)


def watched(loop: SlowLoop | None, clock: ManualClock) -> LoopWatch:
    return LoopWatch(lambda: cast("asyncio.AbstractEventLoop | None", loop), clock.now)


def test_lag_is_how_long_an_answer_takes() -> None:
    clock, loop = ManualClock(), SlowLoop()
    watch = watched(loop, clock)
    watch.ask()
    clock.advance(2.0)
    watch.ask()
    assert len(loop.asked) == 1
    assert watch.stalled_seconds == 2.0
    loop.asked.pop()()
    assert watch.stalled_seconds == 0.0
    assert (watch.lag.count, watch.lag.sum) == (1, 2.0)
    watch.ask()
    assert len(loop.asked) == 1


def step(worker: str, produced_at_ns: int, first_arrival: float) -> Step:
    batch = rows([(2, 2)])
    produced = SimpleNamespace(
        header=batch.header._replace(produced_at_ns=produced_at_ns),
        draft_token_counts=batch.draft_token_counts,
        token_counts=batch.token_counts,
    )
    return Step(worker, 1, 1, cast("object", produced), None, PendingAck(), first_arrival)  # type: ignore[arg-type]


def test_a_step_is_timed_from_its_first_part_and_from_its_making() -> None:
    clock = ManualClock(100.0)
    times = StepTimes(clock.now, lambda: 5_000_000_000)
    times.observe(step("w", 4_750_000_000, 99.5))
    times.observe(step("w", 6_000_000_000, 100.0))
    times.observe(step("w", 0, 100.0))
    assert (times.assembly.count, times.assembly.sum) == (3, 0.5)
    assert (times.delivery.count, times.delivery.sum) == (2, 0.25)
