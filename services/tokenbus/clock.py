"""Clock: the time, which everything that waits is given; tests give a clock of their own."""

import asyncio
import contextlib
import time
from typing import Protocol

from tokenbus.backports import timeout


class Clock(Protocol):
    """Returns the time, and waits."""

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""

    def unix_ms(self) -> int:
        """Return milliseconds since 1970-01-01 UTC, in which processes exchange deadlines."""

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait until an event is set, for at most so many seconds; return whether it is."""


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Return the seconds of the monotonic clock."""
        return time.monotonic()

    def unix_ms(self) -> int:
        """Return milliseconds since 1970-01-01 UTC."""
        return time.time_ns() // 1_000_000

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait until an event is set, for at most so many seconds; return whether it is."""
        if not event.is_set():
            with contextlib.suppress(TimeoutError):
                async with timeout(seconds):
                    await event.wait()
        return event.is_set()
