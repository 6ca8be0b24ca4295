"""The gateway's metrics: requests, what waits for clients, and the latency to a client's socket."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from tokenbus_services.link import SessionState
from tokenbus_services.metrics.families import Family, Histogram, Kind, Samples, one


class Counts:
    """Counters of answers, changed on the event loop and read by a scrape in any thread."""

    def __init__(self) -> None:
        """Begin at zero."""
        self.requests: Counter[tuple[str, str]] = Counter()
        """By route and status."""
        self.refusals: Counter[str] = Counter()
        """Requests over HTTP that were refused, by reason."""
        self.open_answers = 0
        self.left_clients = 0
        """Clients that disconnected before their answer had ended."""
        self.cut_clients = 0
        """Clients that read nothing for too long."""
        self.broken_answers: Counter[str] = Counter()
        """Answers that had begun with status 200 and ended with an error, by its code."""
        self.refused_connections = 0
        self.late_requests = 0
        """Requests that took too long to arrive."""
        self.peak_outbox_bytes = 0
        self.first_token = Histogram()
        """From a request's arrival to the first part of its answer, in seconds."""
        self.to_socket = Histogram()
        """From a row's publication until it was written to its client's socket, in seconds."""


class GatewayView(Protocol):
    """A gateway as a scrape sees it."""

    counts: Any
    feed: Any
    buffers: Any
    client: Any
    settings: Any
    connections: int
    watch: Any

    @property
    def unread_files(self) -> int:
        """How many files have changed and cannot be read."""


def _read(read: Callable[[GatewayView], float]) -> Callable[[GatewayView], Samples]:
    return lambda view: one(read(view))


def _requests(view: GatewayView) -> Samples:
    return view.counts.requests.copy().items()  # type: ignore[no-any-return]


def _broken(view: GatewayView) -> Samples:
    for code, count in view.counts.broken_answers.copy().items():
        yield (code,), count


def _lost(view: GatewayView) -> Samples:
    counts = view.counts
    yield ("left",), counts.left_clients
    yield ("cut_off",), counts.cut_clients
    yield ("late",), counts.late_requests
    yield ("refused",), counts.refused_connections


def _refusals(view: GatewayView) -> Samples:
    for reason, count in view.counts.refusals.copy().items():
        yield (reason,), count


def _fill(view: GatewayView) -> Samples:
    settings = view.settings.gateway
    yield ("requests",), len(view.feed) / settings.max_requests
    yield ("connections",), view.connections / settings.max_connections
    yield ("buffers",), view.buffers.size / settings.buffer_bytes
    yield ("backlog",), min(1.0, view.feed.backlog.size / view.feed.most_backlog)


def _peaks(view: GatewayView) -> Samples:
    yield ("requests",), view.feed.peak / view.settings.gateway.max_requests
    yield ("buffers",), min(1.0, view.buffers.peak / view.settings.gateway.buffer_bytes)
    yield ("stream_buffer",), min(1.0, view.counts.peak_outbox_bytes / view.settings.gateway.stream_buffer_bytes)


GATEWAY: tuple[Family[GatewayView], ...] = (
    Family(
        Kind.GAUGE,
        "tokenbus_gateway_connected_processors",
        "1 while the session with a processor is open, else 0.",
        "0 for long: the log says why if it was refused; check bus.clients_address and bus.key_file.",
        _read(lambda view: view.client.session.state is SessionState.OPEN),
        (),
        "tokenbus_gateway_connected_processors == 0",
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_gateway_answers_total",
        "Requests over HTTP, by route and status; malformed HTTP counts as the route other.",
        "429 or 503 rises: the gateway or the workers are overloaded; 5xx rises: see the log and the error's code.",
        _requests,
        ("route", "status"),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_gateway_broken_answers_total",
        "Answers that had begun, with status 200, and ended with an error event, by its code.",
        "slow_client: clients read too slowly; worker_lost, gap: check the workers; others: see the log.",
        _broken,
        ("code",),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_gateway_open_answers",
        "Answers in flight: waiting for tokens, or being sent.",
        "High: load.",
        _read(lambda view: view.counts.open_answers),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_gateway_open_requests",
        "Requests in flight on the bus; an answer has one for each choice.",
        "Near gateway.max_requests: new requests get status 429; add gateways, or raise the limit.",
        _read(lambda view: len(view.feed)),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_gateway_open_connections",
        "Connections of clients, including idle ones.",
        "Near gateway.max_connections: new connections are refused.",
        _read(lambda view: view.connections),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_gateway_tokens_total",
        "Tokens received for this gateway's requests.",
        "Low: few requests, or slow workers.",
        _read(lambda view: view.feed.tokens),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_gateway_aborted_requests_total",
        "Requests aborted because their client had gone or their answer had ended.",
        "High compared with answers: clients give up; check the time to the first token.",
        _read(lambda view: view.feed.aborted),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_gateway_lost_clients_total",
        "Clients that disconnected early (left), read nothing for too long (cut_off), sent too slowly (late), or were "
        "above the connection limit (refused).",
        "cut_off or late rises: slow networks, or an attack; refused rises: raise gateway.max_connections.",
        _lost,
        ("why",),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_gateway_refusals_total",
        "Refused requests by reason: no_key and unknown_key (401), host (421), origin (403), rate and concurrency "
        "(429, of one key).",
        "no_key or unknown_key rises: a client has the wrong key, or guesses; the log names the peer. host: "
        "gateway.hosts lacks a name, or a foreign page tries; origin: gateway.origins; rate, concurrency: its limits.",
        _refusals,
        ("why",),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_gateway_evicted_answers_total",
        "Answers evicted because they held the most while all together exceeded gateway.buffer_bytes.",
        "Rises: clients do not read, or request more than this gateway can write; see the fill ratio of buffers.",
        _read(lambda view: view.buffers.evicted),
        (),
        "increase(tokenbus_gateway_evicted_answers_total[5m]) > 0",
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_gateway_unread_files",
        "How many of the key file and the certificate have changed and cannot be read; the former ones stay in force.",
        "Above 0: the log names the file and the error; revoked keys may still be accepted.",
        _read(lambda view: view.unread_files),
        (),
        "tokenbus_gateway_unread_files > 0",
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_gateway_fill_ratio",
        "How full each bounded resource of the gateway is, from 0 to 1.",
        "Near 1: backpressure or refusals are near; docs/settings.md has the limit of each.",
        _fill,
        ("of",),
        "tokenbus_gateway_fill_ratio > 0.8",
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_gateway_peak_fill_ratio",
        "The peak of each fill ratio; stream_buffer is the fullest of all streams.",
        "stream_buffer at 1: clients that read too slowly lose their requests.",
        _peaks,
        ("of",),
    ),
    Family(
        Kind.HISTOGRAM,
        "tokenbus_gateway_first_token_seconds",
        "From a request's arrival to its first token; to the whole answer if it is not streamed.",
        "High: workers are busy, or prompts are long.",
        lambda view: view.counts.first_token,
    ),
    Family(
        Kind.HISTOGRAM,
        "tokenbus_gateway_socket_latency_seconds",
        "From a row's publication to its write to the client's socket; needs synchronised clocks.",
        "High: the gateway lacks CPU time; add gateways, or request fewer alternatives.",
        lambda view: view.counts.to_socket,
        (),
        "histogram_quantile(0.5, sum by (le) (rate(tokenbus_gateway_socket_latency_seconds_bucket[5m]))) > 0.05",
    ),
    Family(
        Kind.HISTOGRAM,
        "tokenbus_gateway_event_loop_lag_seconds",
        "How late the gateway's event loop runs.",
        "High: the process lacks CPU time; add gateways.",
        lambda view: view.watch.lag,
        (),
        "histogram_quantile(0.99, sum by (le) (rate(tokenbus_gateway_event_loop_lag_seconds_bucket[5m]))) > 0.1",
    ),
)
"""All metrics of a gateway."""
