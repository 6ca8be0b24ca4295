"""Clocks: the machine's own, and the one that tests move, wait alike."""

import asyncio

import pytest

from tests.support.waiting import soon, turns
from tokenbus.clock import Clock, SystemClock
from tokenbus.testing import ManualClock

both = pytest.mark.parametrize("clock", [SystemClock(), ManualClock()], ids=["system", "test's"])


@both
async def test_wait_ends_with_the_event(clock: Clock) -> None:
    event = asyncio.Event()
    waiting = asyncio.create_task(clock.wait(event, 3600))
    await turns()
    assert not waiting.done()
    event.set()
    assert await soon(waiting)
    assert await soon(clock.wait(event, 0))
    assert not await soon(clock.wait(asyncio.Event(), 0))


@both
async def test_cancelled_wait_is_over(clock: Clock) -> None:
    """A cancelled wait raises, on the tests' clock also where its time ends in the same turn."""
    waiting = asyncio.create_task(clock.wait(asyncio.Event(), 3600))
    await turns()
    if isinstance(clock, ManualClock):
        clock.advance(3600)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(waiting)


async def test_wait_of_no_time_lets_others_run() -> None:
    for seconds in (0.0, -1.0):
        clock, event = ManualClock(), asyncio.Event()
        asyncio.get_running_loop().call_soon(event.set)
        assert await clock.wait(event, seconds)
        assert not await clock.wait(asyncio.Event(), seconds)


async def test_tests_clock_stands_until_it_is_moved() -> None:
    clock = ManualClock(start=5.0)
    waits = [asyncio.create_task(clock.wait(asyncio.Event(), seconds)) for seconds in (1.0, 2.0, 3.0)]
    await turns()
    clock.advance(1.0)
    clock.set(7.0)
    await turns()
    assert [wait.done() for wait in waits] == [True, True, False]
    assert clock.now() == 7.0
    clock.advance(0.99)
    await turns()
    assert not waits[2].done()
    clock.set(8.0)
    assert await soon(waits[2]) is False
