"""The clock of the tests: it stands still until a test moves it."""

import asyncio


class ManualClock:
    """A `Clock` whose seconds pass when the test says so; coroutines that wait on it wake when it moves."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._moved = asyncio.Event()
        self.waits = 0
        """How many waits have begun."""

    def now(self) -> float:
        """Return the time, in seconds."""
        return self._now

    def unix_ms(self) -> int:
        """Return the same time as a moment, in milliseconds since 1970-01-01 UTC."""
        return 1_700_000_000_000 + int(self._now * 1000)

    def advance(self, seconds: float) -> None:
        """Let time pass, and wake the waits."""
        self.set(self._now + seconds)

    def set(self, seconds: float) -> None:
        """Make it this time, and wake the waits."""
        self._now = seconds
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait until an event is set, or until the test has let so many seconds pass; return whether it is set."""
        end = self.now() + seconds
        self.waits += 1
        while not event.is_set() and self.now() < end:
            both = [asyncio.create_task(event.wait()), asyncio.create_task(self._moved.wait())]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in both:
                    task.cancel()
        return event.is_set()
