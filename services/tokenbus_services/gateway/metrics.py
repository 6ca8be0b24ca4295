"""The metrics of the gateway: who asks, what waits for whom, and how long it takes to a client's socket."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from tokenbus_services.link import SessionState
from tokenbus_services.metrics.families import Family, Histogram, Kind, Samples, one


class Counts:
    """Plain numbers, changed on the event loop and read by whoever scrapes."""

    def __init__(self) -> None:
        """Begin at nothing."""
        self.requests: Counter[tuple[str, str]] = Counter()
        """By route and status."""
        self.refusals: Counter[str] = Counter()
        """Of requests over HTTP that were not let in, by why."""
        self.open_answers = 0
        self.left_clients = 0
        """How many clients went away before their answer had ended."""
        self.cut_clients = 0
        """How many clients took nothing for too long."""
        self.broken_answers: Counter[str] = Counter()
        """By the code of the error that they ended with, after they had begun with status 200."""
        self.refused_connections = 0
        self.late_requests = 0
        """How many requests took too long to arrive."""
        self.peak_outbox_bytes = 0
        self.first_token = Histogram()
        """From a request's arrival until the first of its answer is there, in seconds."""
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
    for why, count in view.counts.refusals.copy().items():
        yield (why,), count


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
        "1 while a processor has answered this gateway's hello and is heard, else 0.",
        "0 for long: the log says whether it was refused, and why; look at bus.clients_address and bus.key_file.",
        _read(lambda view: view.client.session.state is SessionState.OPEN),
        (),
        "tokenbus_gateway_connected_processors == 0",
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_gateway_answers_total",
        "Requests over HTTP, by route and status; those that are no HTTP at all count to the route other.",
        "429 or 503 moves: the gateway or the workers are full; 5xx moves: the log and the error's code say why.",
        _requests,
        ("route", "status"),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_gateway_broken_answers_total",
        "Answers that had begun, with status 200, and ended with an error event, by its code.",
        "slow_client: clients that read too slowly; worker_lost, gap: look at the workers; the rest: at the log.",
        _broken,
        ("code",),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_gateway_open_answers",
        "Answers that are being waited for or sent.",
        "High: that is load.",
        _read(lambda view: view.counts.open_answers),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_gateway_open_requests",
        "Requests that are open on the bus, of which an answer with several choices has several.",
        "Near gateway.max_requests: new ones get status 429; add gateways, or raise the bound.",
        _read(lambda view: len(view.feed)),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_gateway_open_connections",
        "Connections of clients, the idle ones included.",
        "Near gateway.max_connections: new ones are refused.",
        _read(lambda view: view.connections),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_gateway_tokens_total",
        "Tokens that came for this gateway's requests.",
        "Low: few are asked for, or workers are slow.",
        _read(lambda view: view.feed.tokens),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_gateway_aborted_requests_total",
        "Requests that were ended at their worker because nobody waited for them any more.",
        "High for its answers: clients give up; look at the time to the first token.",
        _read(lambda view: view.feed.aborted),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_gateway_lost_clients_total",
        "Clients that went away before the end (left), took nothing for too long (cut_off), sent too slowly (late), or "
        "were one too many (refused).",
        "cut_off or late moves: slow networks, or an attack; refused moves: raise gateway.max_connections.",
        _lost,
        ("why",),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_gateway_refusals_total",
        "Requests that were not let in, by why: no_key and unknown_key (401), host (421), origin (403), rate and "
        "concurrency (429, of one key).",
        "no_key or unknown_key moves: a client has the wrong key, or guesses; the log says who. host: gateway.hosts "
        "lacks a name, or a page elsewhere tries; origin: gateway.origins. rate, concurrency: the limits of a key.",
        _refusals,
        ("why",),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_gateway_evicted_answers_total",
        "Answers that ended because they held the most where all clients together held too much.",
        "Moves: clients do not read, or want more than this gateway can write; the fill ratio of buffers says more.",
        _read(lambda view: view.buffers.evicted),
        (),
        "increase(tokenbus_gateway_evicted_answers_total[5m]) > 0",
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_gateway_unread_files",
        "How many of the API keys' file and the certificate have changed and cannot be read; what was read holds.",
        "Above 0: the log says what is wrong with which; a key that is to be revoked is not.",
        _read(lambda view: view.unread_files),
        (),
        "tokenbus_gateway_unread_files > 0",
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_gateway_fill_ratio",
        "How full each bounded thing of the gateway is, from 0 to 1.",
        "Near 1: what is named is about to refuse somebody; docs/settings.md has its bound.",
        _fill,
        ("of",),
        "tokenbus_gateway_fill_ratio > 0.8",
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_gateway_peak_fill_ratio",
        "How full each of those was at most; of the streams' buffers, the fullest.",
        "stream_buffer at 1: clients that read too slowly lose their requests.",
        _peaks,
        ("of",),
    ),
    Family(
        Kind.HISTOGRAM,
        "tokenbus_gateway_first_token_seconds",
        "From a request's arrival until the first of its answer is there; if it is not streamed, all of it.",
        "High: workers are busy, or prompts are long.",
        lambda view: view.counts.first_token,
    ),
    Family(
        Kind.HISTOGRAM,
        "tokenbus_gateway_socket_latency_seconds",
        "From a row's publication until it was written to its client's socket, as far as both clocks agree.",
        "High: the gateway lacks CPU time; add gateways, or ask for fewer alternatives.",
        lambda view: view.counts.to_socket,
        (),
        "histogram_quantile(0.5, sum by (le) (rate(tokenbus_gateway_socket_latency_seconds_bucket[5m]))) > 0.05",
    ),
    Family(
        Kind.HISTOGRAM,
        "tokenbus_gateway_event_loop_lag_seconds",
        "How late the gateway's event loop answers.",
        "High: the process lacks CPU time; add gateways.",
        lambda view: view.watch.lag,
        (),
        "histogram_quantile(0.99, sum by (le) (rate(tokenbus_gateway_event_loop_lag_seconds_bucket[5m]))) > 0.1",
    ),
)
"""All that is told of a gateway."""
