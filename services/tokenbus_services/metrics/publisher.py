"""The metrics of a publisher: its retention, its backpressure policy, and its connection to the processor."""

from collections.abc import Callable

from tokenbus_services.link import SessionState
from tokenbus_services.metrics.families import Family, Histogram, Kind, Samples
from tokenbus_services.metrics.health import LoopWatch
from tokenbus_services.worker import Publisher

_WORKER = ("worker",)


class PublisherView:
    """A publisher as a scrape sees it; two numbers of one scrape may be a moment apart."""

    def __init__(self, publisher: Publisher, watch: LoopWatch) -> None:
        """Take the publisher, and the watch of its event loop."""
        self.publisher = publisher
        self.watch = watch


def _read(read: Callable[[Publisher], float]) -> Callable[[PublisherView], Samples]:
    return lambda view: (((view.publisher.worker_id,), read(view.publisher)),)


def _batches(view: PublisherView) -> Samples:
    publisher = view.publisher
    for name in ("gated", "shed", "blocked"):
        yield (publisher.worker_id, name), getattr(publisher, name)


def _handoffs(view: PublisherView) -> Samples:
    publisher = view.publisher
    for name in ("handed_off", "untaken", "taken_over", "refused"):
        yield (publisher.worker_id, name), getattr(publisher.counts, name)


def _lag(view: PublisherView) -> Histogram:
    return view.watch.lag


PUBLISHER: tuple[Family[PublisherView], ...] = (
    Family(
        Kind.GAUGE,
        "tokenbus_worker_connected_processors",
        "1 while a processor has answered this worker's hello and is heard, else 0.",
        "0 for long: the log says whether it was refused, and why; look at bus.workers_address and bus.key_file.",
        _read(lambda publisher: publisher.session.state is SessionState.OPEN),
        _WORKER,
        "tokenbus_worker_connected_processors == 0",
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_worker_handshakes_total",
        "How often a processor answered this worker's hello.",
        "Moves without a deployment: the processor restarts, or the connection breaks.",
        _read(lambda publisher: publisher.session.handshakes),
        _WORKER,
        "increase(tokenbus_worker_handshakes_total[5m]) > 2",
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_worker_published_items_total",
        "Items that were published, those that found no room too.",
        "Low: the engine computes few steps.",
        _read(lambda publisher: publisher.retention.next_sequence - 1),
        _WORKER,
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_worker_published_bytes_total",
        "Payload bytes of the items that found room.",
        "High for its tokens: requests ask for many alternatives.",
        _read(lambda publisher: publisher.retention.kept_bytes),
        _WORKER,
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_worker_retained_items",
        "Items that no processor has acknowledged yet.",
        "High: the processor is away, or its consumers are slow; when it is full worker.policy decides.",
        _read(lambda publisher: len(publisher.retention)),
        _WORKER,
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_worker_retained_bytes",
        "Payload bytes of those items.",
        "High: as retained_items, and this process's memory.",
        _read(lambda publisher: publisher.retention.bytes),
        _WORKER,
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_worker_peak_retained_items",
        "The most items that were retained at once, since the start.",
        "Near worker.retention_items: the next pause of the processor meets the policy; raise the bound.",
        _read(lambda publisher: publisher.retention.peak_items),
        _WORKER,
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_worker_peak_retained_bytes",
        "The most payload bytes that were retained at once, since the start.",
        "Near worker.retention_bytes: as peak_retained_items.",
        _read(lambda publisher: publisher.retention.peak_bytes),
        _WORKER,
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_worker_retention_ratio",
        "How full retention is, from 0 to 1, by items or by bytes, whichever is fuller.",
        "Near 1: as retained_items; under the policy shed alternatives go from worker.shed_at on.",
        _read(lambda publisher: publisher.retention.share_used()),
        _WORKER,
        "tokenbus_worker_retention_ratio > 0.5",
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_worker_policy_batches_total",
        "Batches that something was done to: gated, not this rank's; shed, without alternatives; blocked, had to wait.",
        "shed or blocked moves: retention fills; look at the processor. gated moves on ranks other than 0, rightly.",
        _batches,
        ("worker", "action"),
        'sum by (worker, action) (increase(tokenbus_worker_policy_batches_total{action!="gated"}[5m])) > 0',
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_worker_blocked_seconds_total",
        "How long the engine waited for room in retention.",
        "Moves: that time the engine computed nothing.",
        _read(lambda publisher: publisher.blocked_seconds),
        _WORKER,
        "rate(tokenbus_worker_blocked_seconds_total[5m]) > 0.05",
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_worker_unpublished_rows_total",
        "Rows that found no room: their requests end with an error.",
        "Moves: raise worker.retention_items and worker.retention_bytes, or find out why nothing is acknowledged.",
        _read(lambda publisher: publisher.failed),
        _WORKER,
        "increase(tokenbus_worker_unpublished_rows_total[5m]) > 0",
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_worker_credit_items",
        "Items that may still be sent.",
        "At 0 for long: the processor's consumers are slow, or the processor is.",
        _read(lambda publisher: max(0, publisher.session.credit[0])),
        _WORKER,
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_worker_credit_bytes",
        "Payload bytes that may still be sent.",
        "Near 0 for long: as credit_items.",
        _read(lambda publisher: max(0, publisher.session.credit[1])),
        _WORKER,
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_worker_replayed_items_total",
        "Items that the processor asked for again and got.",
        "Moves steadily: the network loses messages.",
        _read(lambda publisher: publisher.session.replayed),
        _WORKER,
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_worker_open_requests",
        "Requests that this worker has.",
        "At worker.max_requests: new ones go to others, or are refused.",
        _read(lambda publisher: len(publisher.session.requests)),
        _WORKER,
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_worker_waiting_requests",
        "Requests and aborts that came and that the engine has not looked at yet.",
        "High: the engine's steps take long.",
        _read(lambda publisher: publisher.waiting_requests),
        _WORKER,
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_worker_failed_steps_total",
        "Steps of the engine that raised: requests that it had ended with an error.",
        "Moves: the log says what was raised.",
        _read(lambda publisher: publisher.counts.failed_steps),
        _WORKER,
        "increase(tokenbus_worker_failed_steps_total[5m]) > 0",
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_worker_engine_failed_requests_total",
        "Requests that the engine failed to take or to abort: each ended with an error, alone.",
        "Moves: a defect of the engine that requests can reach; the log says what was raised.",
        _read(lambda publisher: publisher.counts.engine_errors),
        _WORKER,
        "increase(tokenbus_worker_engine_failed_requests_total[5m]) > 0",
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_worker_waiting_state_bytes",
        "Bytes of states that were handed off to this worker and wait for its engine.",
        "Near worker.handoff_bytes: the engine's steps take long; above it hand-offs are refused.",
        _read(lambda publisher: publisher.counts.waiting_state_bytes),
        _WORKER,
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_worker_handoff_requests_total",
        "Requests that changed hands. At a prefill worker: handed_off, a decode worker took it; untaken, none did. "
        "At a decode worker: taken_over, the engine took it; refused, it did not.",
        "untaken or refused moves: decode workers are full, away, or of another kind; the error says which.",
        _handoffs,
        ("worker", "outcome"),
        'sum by (worker) (increase(tokenbus_worker_handoff_requests_total{outcome=~"untaken|refused"}[5m])) > 0',
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_worker_refused_connections_total",
        "Connections for hand-offs that a decode worker's transport turned away or cut off.",
        "Moves: something else than a prefill worker connects to worker.handoff_address; the log says why it went.",
        _read(lambda publisher: publisher.counts.refused_connections),
        _WORKER,
        "increase(tokenbus_worker_refused_connections_total[5m]) > 0",
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_worker_unanswered_requests",
        "Requests that were sent to a decode worker which has not answered yet.",
        "High: decode workers' steps take long; after worker.handoff_timeout_ms the requests end.",
        _read(lambda publisher: publisher.counts.handing_off),
        _WORKER,
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_worker_refused_frames_total",
        "Frames of the processor that break the contract, and were dropped.",
        "Moves: the processor is of another version, or something else listens there.",
        _read(lambda publisher: publisher.link.refused_frames),
        _WORKER,
        "increase(tokenbus_worker_refused_frames_total[5m]) > 0",
    ),
    Family(
        Kind.HISTOGRAM,
        "tokenbus_worker_event_loop_lag_seconds",
        "How late the event loop that sends for this worker answers.",
        "High: the process lacks CPU time; an engine with a loop of its own uses `with Publisher`.",
        _lag,
        (),
        "histogram_quantile(0.99, sum by (le) (rate(tokenbus_worker_event_loop_lag_seconds_bucket[5m]))) > 0.05",
    ),
)
