"""Health: whether a process does what it is there for, and what is wrong if it does not."""

import json
from dataclasses import dataclass

from tokenbus_services.link import SessionState
from tokenbus_services.metrics.loop import LoopWatch
from tokenbus_services.processor import Processor
from tokenbus_services.worker import Publisher


@dataclass(frozen=True, slots=True)
class Health:
    """What is wrong, if anything, and a few facts."""

    problems: tuple[str, ...]
    facts: dict[str, object]

    @property
    def body(self) -> bytes:
        """The same as JSON."""
        state = "failing" if self.problems else "ok"
        return (json.dumps({"status": state, "problems": self.problems, **self.facts}) + "\n").encode()


def processor_health(processor: Processor, watch: LoopWatch) -> Health:
    """Tell whether a processor takes workers and clients."""
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
    """Tell whether a publisher takes batches and is not refused; a processor that is away is none of its problems."""
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
    """Tell whether an event loop has not answered for too long."""
    seconds = watch.stalled_seconds
    return [f"its event loop has not answered for {seconds:.1f} s"] if seconds * 1000 > most_ms else []
