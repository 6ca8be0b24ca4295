"""Health of a process: the problems that keep it from its work, and whether its event loop is stuck."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

from tokenbus_services.link import SessionState
from tokenbus_services.metrics.families import Histogram
from tokenbus_services.processor import Processor
from tokenbus_services.worker import Publisher


class LoopWatch:
    """Calls into an event loop from another thread, and measures how long the answer takes."""

    def __init__(self, loop: Callable[[], asyncio.AbstractEventLoop | None], now: Callable[[], float]) -> None:
        """Take a function that returns the loop, or None before there is one, and a clock in seconds."""
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
    """The problems, if any, and a few facts."""

    problems: tuple[str, ...]
    facts: dict[str, object]

    @property
    def body(self) -> bytes:
        """The body of /healthz, as JSON."""
        state = "failing" if self.problems else "ok"
        return (json.dumps({"status": state, "problems": self.problems, **self.facts}) + "\n").encode()


def processor_health(processor: Processor, watch: LoopWatch) -> Health:
    """Return the health of a processor: whether it takes workers and clients."""
    problems = stalled(watch, processor.settings.metrics.stall_timeout_ms)
    if not processor.is_listening:
        problems.append("it does not listen for workers and clients")
    problems += [f"{address}: its file was removed or replaced" for address in processor.unreachable]
    facts = {
        "service": "processor",
        "id": processor.id,
        "is_draining": processor.workers.is_draining,
        "workers": len(processor.workers.by_id),
        "clients": len(processor.clients.sessions),
        "open_requests": len(processor.registry.table),
    }
    return Health(tuple(problems), facts)


def publisher_health(publisher: Publisher, watch: LoopWatch) -> Health:
    """Return the health of a publisher: whether it takes batches; a processor that is away is no problem of its own."""
    problems = stalled(watch, publisher.settings.metrics.stall_timeout_ms)
    session, refusal = publisher.session, publisher.session.refusal
    if not publisher.is_running:
        problems.append("it does not publish: it was not started, or it was closed")
    if session.state is SessionState.REFUSED and refusal is not None:
        problems.append(f"its processor refuses it: {refusal.message}")
    facts = {
        "service": "worker",
        "id": publisher.worker_id,
        "connection": session.state.name.lower(),
        "processor": session.processor_id,
        "retained_items": len(publisher.retention),
        "open_requests": len(session.requests),
    }
    return Health(tuple(problems), facts)


def stalled(watch: LoopWatch, most_ms: int) -> list[str]:
    """Return the problem of an event loop that has not answered for more than `most_ms`, or nothing."""
    seconds = watch.stalled_seconds
    return [f"its event loop has not answered for {seconds:.1f} s"] if seconds * 1000 > most_ms else []
