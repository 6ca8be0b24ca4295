"""ManualClock: a clock that a test controls."""

import asyncio
import contextlib
import time

from tokenbus.backports import Timeout


class ManualClock:
    """A clock that moves only when the test moves it. Tasks whose wait is over then continue.

    Example:
        clock = tokenbus.testing.ManualClock()
        before = clock.now()
        clock.advance(2.5)
        assert clock.now() - before == 2.5
    """

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._due: dict[Timeout, float] = {}
        """The time at which each wait ends."""
        self._runs_since: float | None = None
        """The machine's time when `run` was called, or None before that call."""

    def now(self) -> float:
        """Return the time in seconds."""
        return self._now + (0.0 if self._runs_since is None else time.monotonic() - self._runs_since)

    def unix_ms(self) -> int:
        """Return the time in milliseconds since 1970-01-01 UTC."""
        return 1_700_000_000_000 + int(self.now() * 1000)

    def advance(self, seconds: float) -> None:
        """Move the clock forward, and end overdue waits."""
        self.set(self._now + seconds)

    def set(self, seconds: float) -> None:
        """Set the time, and end overdue waits."""
        self._now = seconds
        for wait in [wait for wait, due in self._due.items() if due <= seconds]:
            del self._due[wait]
            wait.reschedule(asyncio.get_running_loop().time())

    def run(self) -> None:
        """Let the clock run from now on at the speed of the machine's clock."""
        self._runs_since = time.monotonic()
        for wait, due in self._due.items():
            wait.reschedule(asyncio.get_running_loop().time() + max(0.0, due - self._now))
        self._due.clear()

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait for an event for at most `seconds` of this clock. Return whether the event is set."""
        if not event.is_set() and seconds <= 0:
            await asyncio.sleep(0)
        elif not event.is_set():
            with contextlib.suppress(TimeoutError):
                async with Timeout(None) as wait:
                    if self._runs_since is None:
                        self._due[wait] = self._now + seconds
                    else:
                        wait.reschedule(asyncio.get_running_loop().time() + seconds)
                    try:
                        await event.wait()
                    finally:
                        self._due.pop(wait, None)
        return event.is_set()
