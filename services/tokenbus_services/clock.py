"""Time, as it is handed to everything that waits: tests hand over a clock of their own."""

import asyncio
import contextlib
import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time, and waits."""

    def now(self) -> float:
        """Return seconds of a clock that never goes back."""

    def unix_ms(self) -> int:
        """Return milliseconds since 1970-01-01 UTC: what moments are told in, between processes."""

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait until an event is set, at most so many seconds; tell whether it is."""


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Return seconds of the monotonic clock."""
        return time.monotonic()

    def unix_ms(self) -> int:
        """Return milliseconds since 1970-01-01 UTC."""
        return time.time_ns() // 1_000_000

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait until an event is set, at most so many seconds; tell whether it is."""
        if not event.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await event.wait()
        return event.is_set()
