"""Clocks: the machine's own, and the one that tests move, wait alike."""

import asyncio

import pytest

from tests.support.waiting import soon, turns
from tokenbus.clock import Clock, SystemClock
from tokenbus.testing import ManualClock


@pytest.mark.parametrize("clock", [SystemClock(), ManualClock()], ids=["system", "test's"])
async def test_wait_ends_with_the_event(clock: Clock) -> None:
    """A wait ends when its event is set, long before its time, and says so; one that is set needs no wait."""
    event = asyncio.Event()
    waiting = asyncio.create_task(clock.wait(event, 3600))
    await turns()
    assert not waiting.done()
    event.set()
    assert await soon(waiting)
    assert await soon(clock.wait(event, 0))
    assert not await soon(clock.wait(asyncio.Event(), 0))


async def test_tests_clock_stands_until_it_is_moved() -> None:
    """A wait on the tests' clock ends exactly when so much time was let pass."""
    clock = ManualClock()
    waiting = asyncio.create_task(clock.wait(asyncio.Event(), 2.0))
    for seconds in (1.0, 0.99):
        await turns()
        clock.advance(seconds)
        await turns()
        assert not waiting.done()
    clock.advance(0.01)
    assert not await soon(waiting)


async def test_cancelled_wait_is_over() -> None:
    for clock in (SystemClock(), ManualClock()):
        waiting = asyncio.create_task(clock.wait(asyncio.Event(), 3600))
        await turns()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await soon(waiting)
