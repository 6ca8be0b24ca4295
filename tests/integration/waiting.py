"""Waits that end."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tests.integration.programs import MOST

T = TypeVar("T")
_LOOK_SECONDS = 0.005


async def soon(awaitable: Awaitable[T]) -> T:
    """Return what is awaited, or fail."""
    return await asyncio.wait_for(awaitable, MOST)


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds that nothing announces, as what another process or a library's thread does."""
    async with asyncio.timeout(MOST):
        while not condition():  # noqa: ASYNC110 - no event exists
            await asyncio.sleep(_LOOK_SECONDS)
