"""The metrics of a publisher, of its retention, backpressure policy and connection, and its health."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tokenbus_services.link import SessionState
from tokenbus_services.metrics.families import Family, FamilyCollector, families
from tokenbus_services.metrics.health import Health, LoopWatch, stalled
from tokenbus_services.metrics.server import MetricsServer
from tokenbus_services.worker import Publisher


class PublisherView(NamedTuple):
    """A publisher as a scrape sees it; two numbers of one scrape may be a moment apart."""

    publisher: Publisher
    watch: LoopWatch


def _of_publisher(*rows: tuple[str, str, Callable[[Publisher], float]]) -> Iterator[Family[PublisherView]]:
    return families(rows, lambda read, view: {view.publisher.worker_id: read(view.publisher)})


def _attributes(worker: str, subject: object, *names: str) -> dict[tuple[str, ...], float]:
    return {(worker, name): getattr(subject, name) for name in names}


PUBLISHER: tuple[Family[PublisherView], ...] = (
    *_of_publisher(
        (
            "tokenbus_worker_connected_processors{worker}",
            "1 while a processor has answered this worker's hello and is heard, else 0.",
            lambda of: of.session.state is SessionState.OPEN,
        ),
        (
            "tokenbus_worker_handshakes_total{worker}",
            "How often a processor answered this worker's hello.",
            lambda of: of.session.handshakes,
        ),
        (
            "tokenbus_worker_published_items_total{worker}",
            "Items that were published, those that found no room too.",
            lambda of: of.retention.next_sequence - 1,
        ),
        (
            "tokenbus_worker_published_bytes_total{worker}",
            "Payload bytes of the items that found room.",
            lambda of: of.retention.kept_bytes,
        ),
        ("tokenbus_worker_retained_items{worker}", "Items not acknowledged yet.", lambda of: len(of.retention)),
        ("tokenbus_worker_retained_bytes{worker}", "Payload bytes of those items.", lambda of: of.retention.bytes),
        ("tokenbus_worker_peak_retained_items{worker}", "Their peak.", lambda of: of.retention.peak_items),
        ("tokenbus_worker_peak_retained_bytes{worker}", "Their peak, in bytes.", lambda of: of.retention.peak_bytes),
        (
            "tokenbus_worker_retention_ratio{worker}",
            "How full retention is, from 0 to 1, by items or by bytes, whichever is fuller.",
            lambda of: of.retention.share_used(),
        ),
    ),
    Family(
        "tokenbus_worker_policy_batches_total{worker, action}",
        "Batches: gated, not this rank's; shed, without alternatives; blocked, had to wait.",
        lambda view: _attributes(view.publisher.worker_id, view.publisher, "gated", "shed", "blocked"),
    ),
    *_of_publisher(
        (
            "tokenbus_worker_blocked_seconds_total{worker}",
            "How long the engine waited for room in retention.",
            lambda of: of.blocked_seconds,
        ),
        (
            "tokenbus_worker_unpublished_rows_total{worker}",
            "Rows that found no room: their requests end with an error.",
            lambda of: of.failed,
        ),
        ("tokenbus_worker_credit_items{worker}", "Items it may send.", lambda of: max(0, of.session.credit[0])),
        ("tokenbus_worker_credit_bytes{worker}", "Bytes it may send.", lambda of: max(0, of.session.credit[1])),
        ("tokenbus_worker_replayed_items_total{worker}", "Items sent again.", lambda of: of.session.replayed),
        ("tokenbus_worker_open_requests{worker}", "Requests it has.", lambda of: len(of.session.requests)),
        (
            "tokenbus_worker_waiting_requests{worker}",
            "Requests and aborts that the engine has not looked at yet.",
            lambda of: of.waiting_requests,
        ),
        (
            "tokenbus_worker_handed_over_items{worker}",
            "Steps and events that an engine in another process handed over, and that are not published.",
            lambda of: of.handed_over,
        ),
        (
            "tokenbus_worker_publisher_processes_total{worker}",
            "Publishers that this worker's stream has had, one after the other.",
            lambda of: of.starts,
        ),
        (
            "tokenbus_worker_failed_steps_total{worker}",
            "Steps of the engine that raised: requests ended with an error.",
            lambda of: of.counts.failed_steps,
        ),
        (
            "tokenbus_worker_engine_failed_requests_total{worker}",
            "Requests that the engine failed to take or to abort: each ended with an error, alone.",
            lambda of: of.counts.engine_errors,
        ),
        (
            "tokenbus_worker_waiting_state_bytes{worker}",
            "Bytes of handed-off states that wait for this worker's engine.",
            lambda of: of.counts.waiting_state_bytes,
        ),
    ),
    Family(
        "tokenbus_worker_handoff_requests_total{worker, outcome}",
        "Hand-offs. At a prefill worker: handed_off, a decode worker took it; untaken, none did. At a decode worker: "
        "taken_over, the engine took it; refused, it did not.",
        lambda view: _attributes(
            view.publisher.worker_id, view.publisher.counts, "handed_off", "untaken", "taken_over", "refused"
        ),
    ),
    *_of_publisher(
        (
            "tokenbus_worker_refused_connections_total{worker}",
            "Connections for hand-offs that a decode worker's transport refused or cut off.",
            lambda of: of.counts.refused_connections,
        ),
        (
            "tokenbus_worker_unanswered_requests{worker}",
            "Requests sent to a decode worker that has not answered yet.",
            lambda of: of.counts.handing_off,
        ),
        (
            "tokenbus_worker_refused_frames_total{worker}",
            "Frames of the processor that break the contract, and were dropped.",
            lambda of: of.link.refused_frames,
        ),
    ),
    Family(
        "tokenbus_worker_event_loop_lag_seconds",
        "How late the event loop that sends for this worker answers.",
        lambda view: view.watch.lag,
        is_histogram=True,
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
