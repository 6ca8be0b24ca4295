"""ManualClock: waits end by their event, or by the time that a test lets pass."""

import asyncio

import pytest

from tests.support.waiting import turns
from tokenbus.testing import ManualClock


@pytest.mark.parametrize(("passed", "is_over"), [(1.9, False), (2.0, True), (50.0, True)])
async def test_wait_ends_with_its_time(passed: float, is_over: bool) -> None:  # noqa: FBT001 - a case
    clock, event = ManualClock(), asyncio.Event()
    wait = asyncio.create_task(clock.wait(event, 2.0))
    await turns()
    clock.advance(passed)
    await turns()
    assert wait.done() is is_over
    event.set()
    assert await wait is not is_over


async def test_wait_ends_with_its_event() -> None:
    clock, event = ManualClock(), asyncio.Event()
    wait = asyncio.create_task(clock.wait(event, 2.0))
    await turns()
    event.set()
    assert await wait
    clock.advance(5)  # nothing is left that could end


@pytest.mark.parametrize("seconds", [0.0, -1.0])
async def test_wait_of_no_time_lets_others_run(seconds: float) -> None:
    clock, event = ManualClock(), asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    assert await clock.wait(event, seconds)
    assert not await clock.wait(asyncio.Event(), seconds)


async def test_wait_that_is_cancelled_is_cancelled() -> None:
    """Also where its time ends in the same turn."""
    clock = ManualClock()
    wait = asyncio.create_task(clock.wait(asyncio.Event(), 1.0))
    await turns()
    clock.advance(1.0)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait


async def test_time_moves_twice_in_one_turn() -> None:
    clock = ManualClock(start=5.0)
    waits = [asyncio.create_task(clock.wait(asyncio.Event(), seconds)) for seconds in (1.0, 2.0, 3.0)]
    await turns()
    clock.advance(1.0)
    clock.set(7.0)
    await turns()
    assert [wait.done() for wait in waits] == [True, True, False]
    assert clock.now() == 7.0
    clock.set(8.0)
    assert await waits[2] is False
