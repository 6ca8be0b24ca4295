"""Waits that end: for an awaitable, for a condition that nothing announces, for the coroutines that are ready."""

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tokenbus.backports import timeout

MOST = 60.0
"""Seconds after which a test that waits has failed; a machine that stands still for a while is no failure."""
_EAGER_LOOKS = 200
_LOOK_SECONDS = 0.005

T = TypeVar("T")


async def soon(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, MOST)


async def until(condition: Callable[[], object], every: float = _LOOK_SECONDS) -> None:
    """Wait until a condition holds that nothing announces, or fail; the condition may be a coroutine function.

    The first looks follow each turn of the event loop, for what happens in it; later ones come `every` so many seconds,
    which leaves the processor to the processes and threads that are waited for. What holds only for a moment needs 0.
    """
    looks = 0
    async with timeout(MOST):
        while not await _holds(condition):
            looks += 1
            await asyncio.sleep(0 if looks < _EAGER_LOOKS else every)


async def _holds(condition: Callable[[], object]) -> object:
    found = condition()
    return await found if inspect.isawaitable(found) else found


def wait_until(condition: Callable[[], object], most: float = MOST) -> None:
    """Block until a condition holds that nothing announces; fail after `most` seconds."""
    end = time.monotonic() + most
    while not condition():
        assert time.monotonic() < end, f"what was waited for did not come in {most} s"
        os.sched_yield()


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
