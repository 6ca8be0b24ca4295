"""LoopWatch: whether an event loop still turns, and how late."""

import asyncio
from collections.abc import Callable

from tokenbus_services.metrics.histogram import Histogram


class LoopWatch:
    """Asks an event loop for an answer, from another thread, and measures how long that takes."""

    def __init__(self, loop: Callable[[], asyncio.AbstractEventLoop | None], now: Callable[[], float]) -> None:
        """Take how to find the loop, which may be there only later, and a clock in seconds."""
        self._loop = loop
        self._now = now
        self._asked_at: float | None = None
        self.lag = Histogram()

    def ask(self) -> None:
        """Ask, unless an answer is still owed."""
        loop = self._loop()
        if loop is None or self._asked_at is not None:
            return
        self._asked_at = self._now()
        try:
            loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # it was closed: whoever ran it is not running any more, and says so
            self._asked_at = None

    def _answer(self) -> None:
        if self._asked_at is not None:
            self.lag.observe(self._now() - self._asked_at)
            self._asked_at = None

    @property
    def stalled_seconds(self) -> float:
        """For how long an answer has been owed."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else max(0.0, self._now() - asked_at)
