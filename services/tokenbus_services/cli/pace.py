"""Pace: how often something may happen."""

from collections.abc import Callable


class Pace:
    """Called before each step, it waits so that at most so many begin in a second."""

    def __init__(self, per_second: float, now: Callable[[], float], wait: Callable[[float], object]) -> None:
        """Take the rate, the time in seconds, and what waits for some seconds, or less if it is no longer worth it."""
        self._period = 1 / per_second
        self._now = now
        self._wait = wait
        self._due = now()

    def __call__(self) -> None:
        """Wait until the next step is due."""
        now = self._now()
        if now < self._due:
            self._wait(self._due - now)
        # One late step is made up for, a pause is not: after that, steps would come in a burst.
        self._due = max(self._due, now - self._period) + self._period
