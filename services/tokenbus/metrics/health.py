"""Health of a process: the problems that keep it from its work, and whether its event loop is stuck."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

from tokenbus.metrics.families import Histogram


class LoopWatch:
    """Calls into an event loop from another thread, and measures how long the answer takes."""

    def __init__(self, loop: Callable[[], asyncio.AbstractEventLoop | None], now: Callable[[], float]) -> None:
        self._loop = loop
        self._now = now
        self._asked_at: float | None = None
        self.lag = Histogram()

    def ask(self) -> None:
        """Ask, unless the last answer is still missing."""
        loop = self._loop()
        if loop is None or self._asked_at is not None:
            return
        self._asked_at = self._now()
        try:
            loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # the loop is closed; the health of what ran on it shows that
            self._asked_at = None

    def _answer(self) -> None:
        if self._asked_at is not None:
            self.lag.observe(self._now() - self._asked_at)
            self._asked_at = None

    @property
    def stalled_seconds(self) -> float:
        """How long an answer has been missing, in seconds."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else max(0.0, self._now() - asked_at)


@dataclass(frozen=True, slots=True)
class Health:
    """The problems, if any, that a restart may mend, those outside the process that it cannot, and a few facts."""

    problems: tuple[str, ...]
    facts: dict[str, object]
    outside: tuple[str, ...] = ()
    is_ready: bool = True
    """Whether new work can be taken in spite of the problems outside."""

    @property
    def body(self) -> bytes:
        """The body of /healthz and /readyz, as JSON."""
        state = "failing" if self.problems else "degraded" if self.outside else "ok"
        problems = *self.problems, *self.outside
        return (json.dumps({"status": state, "problems": problems, **self.facts}) + "\n").encode()


def stalled(watch: LoopWatch, most_ms: int) -> list[str]:
    """Return the problem of an event loop that has not answered for more than `most_ms`, or nothing."""
    seconds = watch.stalled_seconds
    return [f"its event loop has not answered for {seconds:.1f} s"] if seconds * 1000 > most_ms else []
