"""Clock: the source of time, which tests replace."""

import asyncio
import contextlib
import time
from typing import Protocol

from tokenbus.backports import timeout


class Clock(Protocol):
    """Tells the time and waits for events."""

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""

    def unix_ms(self) -> int:
        """Return milliseconds since 1970-01-01 UTC, the form of deadlines between processes."""

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait for an event, for at most `seconds`; return whether it is set."""


class SystemClock:
    """The machine's clock."""

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
