"""A clock for coroutines: it stands still until a test moves it, and wakes who waits when it does."""

import asyncio

from tests.services.manual_clock import ManualClock


class LoopClock(ManualClock):
    """A ManualClock that is waited on."""

    def __init__(self, start: float = 1000.0) -> None:
        """Begin with nobody waiting."""
        super().__init__(start)
        self._moved = asyncio.Event()
        self.waits = 0
        """How often somebody began to wait."""

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        super().advance(seconds)
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait until an event is set, or until the test has let so many seconds pass; tell whether it is set."""
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


async def turns(count: int = 50) -> None:
    """Let every coroutine that can go on do so, some times over."""
    for _ in range(count):
        await asyncio.sleep(0)
