"""The metrics and health of a publisher."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tokenbus.bus.link import SessionState
from tokenbus.metrics.families import Family, FamilyCollector, event_loop_lag, fill_ratio
from tokenbus.metrics.server import Health, LoopWatch, MetricsServer, stalled
from tokenbus.worker import Publisher


class PublisherView(NamedTuple):
    """A publisher during one scrape. Two values may be from different moments."""

    publisher: Publisher
    watch: LoopWatch


def _of_publisher(title: str, meaning: str, advice: str, read: Callable[[Publisher], float]) -> Family[PublisherView]:
    return Family(title, meaning, advice, lambda view: {view.publisher.worker_id: read(view.publisher)})


PUBLISHER: tuple[Family[PublisherView], ...] = (
    fill_ratio(lambda view: {"retention": view.publisher.retention.share_used()}),
    event_loop_lag(lambda view: view.watch.lag),
    _of_publisher(
        "tokenbus_worker_connected_processors{worker}",
        "1 while a processor answers, else 0.",
        "If 0 for long, check that a processor runs at bus.workers_address. The log says `refused by processor` or "
        "`handshake failed`.",
        lambda of: of.session.state is SessionState.OPEN,
    ),
    _of_publisher(
        "tokenbus_worker_handshakes_total{worker}",
        "Hellos that a processor answered.",
        "If rising, the processor restarts or idle connections are closed.",
        lambda of: of.session.handshakes,
    ),
    Family(
        "tokenbus_worker_items_total{worker, outcome}",
        "Published items and replayed items.",
        "If `published` is low, steps are few. If `replayed` rises steadily, the network loses messages.",
        lambda view: {
            (view.publisher.worker_id, "published"): view.publisher.retention.next_sequence - 1,
            (view.publisher.worker_id, "replayed"): view.publisher.session.replayed,
        },
    ),
    Family(
        "tokenbus_worker_policy_batches_total{worker, action}",
        "Batches that were gated (published by another rank), shed (without alternatives) or blocked (had to wait).",
        "If `shed` or `blocked` moves, retention fills up, so check the processor.",
        lambda view: {
            (view.publisher.worker_id, action): getattr(view.publisher, action)
            for action in ("gated", "shed", "blocked")
        },
    ),
    _of_publisher(
        "tokenbus_worker_blocked_seconds_total{worker}",
        "Time that the engine waited for room in retention.",
        "With worker.policy = shed, the engine does not wait.",
        lambda of: of.blocked_seconds,
    ),
    _of_publisher(
        "tokenbus_worker_unpublished_rows_total{worker}",
        "Rows without room in retention, whose requests end with an error.",
        "Find out why nothing is acknowledged, then raise worker.retention_bytes.",
        lambda of: of.failed,
    ),
    _of_publisher(
        "tokenbus_worker_waiting_requests{worker}",
        "Requests and aborts that wait for the engine's next step.",
        "If high, the engine's steps take long.",
        lambda of: len(of.incoming),
    ),
    _of_publisher(
        "tokenbus_worker_handed_over_items{worker}",
        "Steps and events of the engine's process that are not yet published.",
        "If rising, retention is full or the publisher lacks a core.",
        lambda of: of.waiting_records,
    ),
    _of_publisher(
        "tokenbus_worker_publisher_processes_total{worker}",
        "Publisher processes that this worker has started.",
        "If rising, the process dies, and the log says why.",
        lambda of: of.starts,
    ),
    Family(
        "tokenbus_worker_engine_failures_total{worker, of}",
        "Exceptions of the engine in a step, or when admitting or aborting a request.",
        "For `step`, `step failed` in the log has the traceback. For `request`, see `engine error`.",
        lambda view: {
            (view.publisher.worker_id, "step"): view.publisher.counts.failed_steps,
            (view.publisher.worker_id, "request"): view.publisher.counts.engine_errors,
        },
    ),
    _of_publisher(
        "tokenbus_worker_refused_frames_total{worker}",
        "Invalid frames from the processor.",
        "The peer has another major version, or is not a processor.",
        lambda of: of.link.refused_frames,
    ),
)


def publisher_collector(publisher: Publisher, watch: LoopWatch) -> FamilyCollector[PublisherView]:
    return FamilyCollector("worker", PUBLISHER, lambda: PublisherView(publisher, watch))


def publisher_health(publisher: Publisher, watch: LoopWatch) -> Health:
    """Return the health of a publisher. The absence of a processor does not count as unhealthy."""
    problems = stalled(watch, publisher.settings.bus.stall_timeout_ms)
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


@contextlib.contextmanager
def serve_publisher(publisher: Publisher) -> Iterator[MetricsServer]:
    """Serve the metrics of a publisher at `worker.metrics_address`, if set. Any thread may call this.

    Raises AddressError if the address cannot be used.
    """
    watch = LoopWatch(lambda: publisher.link.loop, time.monotonic)
    server = MetricsServer(
        "worker.metrics_address",
        publisher.settings.worker.metrics_address,
        publisher_collector(publisher, watch),
        lambda: publisher_health(publisher, watch),
        watch,
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()
