"""Waiter: many tasks that wait, and go on together, on every event loop."""

import asyncio
import sys
from collections.abc import Callable

import pytest
import uvloop

from tests.support.waiting import soon, turns
from tokenbus.client.waiter import Waiter, WakeUps


def eager_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    if sys.version_info >= (3, 12):
        loop.set_task_factory(asyncio.eager_task_factory)
    return loop


LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop, *([eager_loop] if sys.version_info >= (3, 12) else [])]


def waiters(count: int) -> list[Waiter]:
    wake_ups = WakeUps()
    return [Waiter(wake_ups) for _ in range(count)]


async def rounds(waiter: Waiter, seen: list[int], number: int, most: int = 3) -> None:
    for _ in range(most):
        await waiter
        seen.append(number)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_all_that_are_woken_go_on_in_one_callback(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def run() -> None:
        made, seen = waiters(100), list[int]()
        tasks = [asyncio.create_task(rounds(waiter, seen, number)) for number, waiter in enumerate(made)]
        await turns()
        for turn in range(3):
            assert all(waiter.is_waiting for waiter in made)
            seen.clear()
            for waiter in reversed(made):
                waiter.wake()
                waiter.wake()  # twice is once
            assert len(made[0]._wake_ups._waiting) == 100
            assert not any(waiter.is_waiting for waiter in made)
            await asyncio.sleep(0)
            assert seen == list(range(100)), turn
        await soon(asyncio.gather(*tasks))
        assert not made[0]._wake_ups._waiting

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("new_loop", LOOPS)
def test_only_those_go_on_that_have_something_to_take(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def run() -> None:
        wake_ups, seen = WakeUps(), list[int]()
        items: list[list[int]] = [[] for _ in range(9)]
        tasks = [
            asyncio.create_task(rounds(Waiter(wake_ups, mine), seen, number, 1)) for number, mine in enumerate(items)
        ]
        await turns()
        for mine in items[::3]:
            mine.append(1)
        wake_ups.look()
        wake_ups.look()  # twice is once
        await turns()
        assert seen == [0, 3, 6]
        for mine in items:
            mine.append(2)
        wake_ups.look()
        await soon(asyncio.gather(*tasks))
        assert seen == [0, 3, 6, 1, 2, 4, 5, 7, 8]

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("new_loop", LOOPS)
def test_task_that_waits_can_be_cancelled(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def run() -> None:
        made, seen = waiters(3), list[int]()
        tasks = [asyncio.create_task(rounds(waiter, seen, number, 1)) for number, waiter in enumerate(made)]
        await turns()
        tasks[0].cancel("enough")
        assert not made[0].is_waiting
        for waiter in made:
            waiter.wake()
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await tasks[0]
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        await soon(tasks[2])
        assert seen == [2]

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


def test_task_that_exits_the_process_holds_no_other_back() -> None:
    """A task that raises SystemExit ends the loop's run, as it does with futures; the others go on in the next."""
    loop = asyncio.new_event_loop()
    made, seen = waiters(3), list[int]()

    async def leave() -> None:
        await made[0]
        raise SystemExit(3)

    async def wake() -> None:
        await turns()
        for waiter in made:
            waiter.wake()
        await asyncio.gather(*others)

    leaving = loop.create_task(leave())
    others = [loop.create_task(rounds(waiter, seen, number, 1)) for number, waiter in enumerate(made) if number]
    waking = loop.create_task(wake())
    with pytest.raises(SystemExit):
        loop.run_until_complete(waking)
    loop.run_until_complete(waking)
    assert seen == [1, 2]
    assert isinstance(leaving.exception(), SystemExit)
    loop.close()
