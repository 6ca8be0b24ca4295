"""The gateway's metrics: requests, what waits for clients, and the latency to a client's socket."""

from prometheus_client.exposition import generate_latest

from tokenbus_services.gateway.fairness import MOST_WAITING
from tokenbus_services.gateway.state import Gateway
from tokenbus_services.link import SessionState
from tokenbus_services.metrics.families import Family, FamilyCollector, Samples, counter, each, gauge, histogram


def _lost(view: Gateway) -> Samples:
    counts = view.counts
    yield ("left",), counts.left_clients
    yield ("cut_off",), counts.cut_clients
    yield ("late",), counts.late_requests
    yield ("refused",), counts.refused_connections


def _fill(view: Gateway) -> Samples:
    settings = view.settings.gateway
    yield ("requests",), view.feed.open_everywhere / settings.max_requests
    yield ("connections",), view.connections / settings.max_connections
    yield ("buffers",), view.buffers.size / settings.buffer_bytes
    yield ("backlog",), min(1.0, view.feed.backlog.size / view.feed.most_backlog)
    yield ("bodies",), view.bodies.size / view.bodies.most
    yield ("texts",), max(lane.turns.waiting for lane in view.encoders.lanes.values()) / MOST_WAITING


def _peaks(view: Gateway) -> Samples:
    yield ("requests",), view.feed.peak / view.settings.gateway.max_requests
    yield ("buffers",), min(1.0, view.buffers.peak / view.settings.gateway.buffer_bytes)
    yield ("stream_buffer",), min(1.0, view.counts.peak_outbox_bytes / view.settings.gateway.stream_buffer_bytes)


def _waiting(view: Gateway) -> Samples:
    for name, lane in view.encoders.lanes.items():
        yield (name,), lane.turns.waiting


def _ended(view: Gateway) -> Samples:
    for name, lane in view.encoders.lanes.items():
        for why, count in lane.ended.items():
            yield (name, why), count


LOST_PROCESSES = "tokenbus_gateway_lost_processes"

GATEWAY: tuple[Family[Gateway], ...] = (
    gauge(
        "tokenbus_gateway_processes",
        "How many processes of the gateway serve.",
        lambda _: 1,
    ),
    counter(
        f"{LOST_PROCESSES}_total",
        "Processes of the gateway that ended unasked; each is started again.",
        lambda _: 0,
    ),
    gauge(
        "tokenbus_gateway_connected_processors",
        "How many processors the gateway is connected to.",
        lambda view: sum(each.state is SessionState.OPEN for each in view.client.sessions),
    ),
    counter(
        "tokenbus_gateway_answers_total",
        "Requests over HTTP, by route and status; malformed HTTP counts as the route other.",
        lambda view: dict(view.counts.requests).items(),
        "route",
        "status",
    ),
    counter(
        "tokenbus_gateway_broken_answers_total",
        "Answers that had begun, with status 200, and ended with an error event, by its code.",
        lambda view: each(view.counts.broken_answers),
        "code",
    ),
    gauge(
        "tokenbus_gateway_open_answers",
        "Answers in flight: waiting for tokens, or being sent.",
        lambda view: view.counts.open_answers,
    ),
    gauge(
        "tokenbus_gateway_open_requests",
        "Requests in flight on the bus; an answer has one for each choice.",
        lambda view: len(view.feed),
    ),
    gauge(
        "tokenbus_gateway_open_connections",
        "Connections of clients, including idle ones.",
        lambda view: view.connections,
    ),
    counter(
        "tokenbus_gateway_tokens_total",
        "Tokens received for this gateway's requests.",
        lambda view: view.feed.tokens,
    ),
    counter(
        "tokenbus_gateway_aborted_requests_total",
        "Requests aborted because their client had gone or their answer had ended.",
        lambda view: view.feed.aborted,
    ),
    counter(
        "tokenbus_gateway_lost_clients_total",
        "Clients that disconnected early (left), read nothing for too long (cut_off), sent too slowly (late), or were "
        "above the connection limit (refused).",
        _lost,
        "why",
    ),
    counter(
        "tokenbus_gateway_refusals_total",
        "Refused requests by reason: no_key and unknown_key (401), host (421), origin (403), rate and concurrency "
        "(429, of one key).",
        lambda view: each(view.counts.refusals),
        "why",
    ),
    counter(
        "tokenbus_gateway_evicted_answers_total",
        "Answers evicted because they held the most while all together exceeded gateway.buffer_bytes.",
        lambda view: view.buffers.evicted,
    ),
    gauge(
        "tokenbus_gateway_waiting_texts",
        "Texts that wait for an encoder, in the lane of short ones (quick) or of long and costly ones (slow).",
        _waiting,
        "lane",
    ),
    counter(
        "tokenbus_gateway_ended_encoders_total",
        "Encoders that ended before their text was encoded: its time or memory was used up, its client left or "
        "gateway.request_timeout_ms was over (left), or something else ended the process (killed).",
        _ended,
        "lane",
        "why",
    ),
    gauge(
        "tokenbus_gateway_unread_files",
        "How many of the key file and the certificate have changed and cannot be read; the former ones stay in force.",
        lambda view: view.unread_files,
    ),
    gauge("tokenbus_gateway_fill_ratio", "How full each bounded resource of the gateway is, from 0 to 1.", _fill, "of"),
    gauge(
        "tokenbus_gateway_peak_fill_ratio",
        "The peak of each fill ratio; stream_buffer is the fullest of all streams.",
        _peaks,
        "of",
    ),
    histogram(
        "tokenbus_gateway_first_token_seconds",
        "From a request's arrival to its first token; to the whole answer if it is not streamed.",
        lambda view: view.counts.first_token,
    ),
    histogram(
        "tokenbus_gateway_socket_latency_seconds",
        "From a row's publication to its write to the client's socket; needs synchronised clocks.",
        lambda view: view.counts.to_socket,
    ),
    histogram(
        "tokenbus_gateway_event_loop_lag_seconds",
        "How late the gateway's event loop runs.",
        lambda view: view.watch.lag,
    ),
)
"""All metrics of a gateway."""


def metrics_page(gateway: Gateway) -> str:
    """Return the metrics of one process as text."""
    return generate_latest(gateway_collector(gateway)).decode()


def gateway_collector(gateway: Gateway) -> FamilyCollector[Gateway]:
    """Return the collector of a gateway."""
    return FamilyCollector("gateway", GATEWAY, lambda: gateway)
