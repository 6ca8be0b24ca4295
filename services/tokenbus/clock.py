"""Clock: the source of time, which tests can replace."""

import asyncio
import contextlib
import time
from typing import Protocol

from tokenbus.backports import timeout


class Clock(Protocol):
    """Tells the time and waits for events."""

    def now(self) -> float:
        """Return the time of a monotonic clock in seconds."""

    def unix_ms(self) -> int:
        """Return the milliseconds since 1970-01-01 UTC, in which processes tell each other deadlines."""

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait for an event for at most `seconds`. Return whether the event is set."""


class SystemClock:
    """The clock of the machine."""

    def now(self) -> float:
        return time.monotonic()

    def unix_ms(self) -> int:
        return time.time_ns() // 1_000_000

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        if not event.is_set():
            with contextlib.suppress(TimeoutError):
                async with timeout(seconds):
                    await event.wait()
        return event.is_set()
