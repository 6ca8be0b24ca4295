"""The metrics of a publisher, of its retention, backpressure policy and connection, and its health."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tokenbus_services.link import SessionState
from tokenbus_services.metrics.families import Family, FamilyCollector, Samples, counter, gauge, histogram
from tokenbus_services.metrics.health import Health, LoopWatch, stalled
from tokenbus_services.metrics.server import MetricsServer
from tokenbus_services.worker import Publisher


class PublisherView(NamedTuple):
    """A publisher as a scrape sees it; two numbers of one scrape may be a moment apart."""

    publisher: Publisher
    watch: LoopWatch


def _read(read: Callable[[Publisher], float]) -> Callable[[PublisherView], Samples]:
    return lambda view: (((view.publisher.worker_id,), read(view.publisher)),)


def _counter(name: str, meaning: str, read: Callable[[Publisher], float]) -> Family[PublisherView]:
    return counter(name, meaning, _read(read), "worker")


def _gauge(name: str, meaning: str, read: Callable[[Publisher], float]) -> Family[PublisherView]:
    return gauge(name, meaning, _read(read), "worker")


def _batches(view: PublisherView) -> Samples:
    publisher = view.publisher
    for name in ("gated", "shed", "blocked"):
        yield (publisher.worker_id, name), getattr(publisher, name)


def _handoffs(view: PublisherView) -> Samples:
    publisher = view.publisher
    for name in ("handed_off", "untaken", "taken_over", "refused"):
        yield (publisher.worker_id, name), getattr(publisher.counts, name)


PUBLISHER: tuple[Family[PublisherView], ...] = (
    _gauge(
        "tokenbus_worker_connected_processors",
        "1 while a processor has answered this worker's hello and is heard, else 0.",
        lambda publisher: publisher.session.state is SessionState.OPEN,
    ),
    _counter(
        "tokenbus_worker_handshakes_total",
        "How often a processor answered this worker's hello.",
        lambda publisher: publisher.session.handshakes,
    ),
    _counter(
        "tokenbus_worker_published_items_total",
        "Items that were published, those that found no room too.",
        lambda publisher: publisher.retention.next_sequence - 1,
    ),
    _counter(
        "tokenbus_worker_published_bytes_total",
        "Payload bytes of the items that found room.",
        lambda publisher: publisher.retention.kept_bytes,
    ),
    _gauge(
        "tokenbus_worker_retained_items",
        "Items that no processor has acknowledged yet.",
        lambda publisher: len(publisher.retention),
    ),
    _gauge(
        "tokenbus_worker_retained_bytes",
        "Payload bytes of those items.",
        lambda publisher: publisher.retention.bytes,
    ),
    _gauge(
        "tokenbus_worker_peak_retained_items",
        "The most items that were retained at once, since the start.",
        lambda publisher: publisher.retention.peak_items,
    ),
    _gauge(
        "tokenbus_worker_peak_retained_bytes",
        "The most payload bytes that were retained at once, since the start.",
        lambda publisher: publisher.retention.peak_bytes,
    ),
    _gauge(
        "tokenbus_worker_retention_ratio",
        "How full retention is, from 0 to 1, by items or by bytes, whichever is fuller.",
        lambda publisher: publisher.retention.share_used(),
    ),
    counter(
        "tokenbus_worker_policy_batches_total",
        "Batches that something was done to: gated, not this rank's; shed, without alternatives; blocked, had to wait.",
        _batches,
        "worker",
        "action",
    ),
    _counter(
        "tokenbus_worker_blocked_seconds_total",
        "How long the engine waited for room in retention.",
        lambda publisher: publisher.blocked_seconds,
    ),
    _counter(
        "tokenbus_worker_unpublished_rows_total",
        "Rows that found no room: their requests end with an error.",
        lambda publisher: publisher.failed,
    ),
    _gauge(
        "tokenbus_worker_credit_items",
        "Items that may still be sent.",
        lambda publisher: max(0, publisher.session.credit[0]),
    ),
    _gauge(
        "tokenbus_worker_credit_bytes",
        "Payload bytes that may still be sent.",
        lambda publisher: max(0, publisher.session.credit[1]),
    ),
    _counter(
        "tokenbus_worker_replayed_items_total",
        "Items that the processor asked for again and got.",
        lambda publisher: publisher.session.replayed,
    ),
    _gauge(
        "tokenbus_worker_open_requests",
        "Requests that this worker has.",
        lambda publisher: len(publisher.session.requests),
    ),
    _gauge(
        "tokenbus_worker_waiting_requests",
        "Requests and aborts that came and that the engine has not looked at yet.",
        lambda publisher: publisher.waiting_requests,
    ),
    _counter(
        "tokenbus_worker_failed_steps_total",
        "Steps of the engine that raised: requests that it had ended with an error.",
        lambda publisher: publisher.counts.failed_steps,
    ),
    _counter(
        "tokenbus_worker_engine_failed_requests_total",
        "Requests that the engine failed to take or to abort: each ended with an error, alone.",
        lambda publisher: publisher.counts.engine_errors,
    ),
    _gauge(
        "tokenbus_worker_waiting_state_bytes",
        "Bytes of states that were handed off to this worker and wait for its engine.",
        lambda publisher: publisher.counts.waiting_state_bytes,
    ),
    counter(
        "tokenbus_worker_handoff_requests_total",
        "Requests that changed hands. At a prefill worker: handed_off, a decode worker took it; untaken, none did. "
        "At a decode worker: taken_over, the engine took it; refused, it did not.",
        _handoffs,
        "worker",
        "outcome",
    ),
    _counter(
        "tokenbus_worker_refused_connections_total",
        "Connections for hand-offs that a decode worker's transport turned away or cut off.",
        lambda publisher: publisher.counts.refused_connections,
    ),
    _gauge(
        "tokenbus_worker_unanswered_requests",
        "Requests that were sent to a decode worker which has not answered yet.",
        lambda publisher: publisher.counts.handing_off,
    ),
    _counter(
        "tokenbus_worker_refused_frames_total",
        "Frames of the processor that break the contract, and were dropped.",
        lambda publisher: publisher.link.refused_frames,
    ),
    histogram(
        "tokenbus_worker_event_loop_lag_seconds",
        "How late the event loop that sends for this worker answers.",
        lambda view: view.watch.lag,
    ),
)


def publisher_collector(publisher: Publisher, watch: LoopWatch) -> FamilyCollector[PublisherView]:
    """Return the collector of a publisher, and of the watch of its event loop."""
    return FamilyCollector("worker", PUBLISHER, lambda: PublisherView(publisher, watch))


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


@contextlib.contextmanager
def serve_publisher(publisher: Publisher) -> Iterator[MetricsServer]:
    """Serve a publisher's metrics at `worker.metrics_address`, or nowhere if that is empty.

    From any thread, before the publisher starts or after. Raises an AddressError if the address cannot be used.
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
