"""The gateway's metrics: requests, what waits for clients, and the latency to a client's socket."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from prometheus_client.exposition import generate_latest

from tokenbus_services.gateway.fairness import MOST_WAITING
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.model_counts import ModelCounts
from tokenbus_services.link import SessionState
from tokenbus_services.metrics.families import Family, FamilyCollector, Histogram, Samples

T = TypeVar("T", float, Histogram)


def _fill(view: Gateway) -> Samples:
    settings = view.settings.gateway
    return {
        "requests": len(view.feed) / settings.max_requests,
        "connections": view.connections / settings.max_connections,
        "buffers": view.buffers.size / settings.buffer_bytes,
        "backlog": min(1.0, view.feed.backlog.size / view.feed.most_backlog),
        "bodies": view.bodies.size / view.bodies.most,
        "texts": max(lane.turns.waiting for lane in view.encoders.lanes.values()) / MOST_WAITING,
    }


def _peaks(view: Gateway) -> Samples:
    settings = view.settings.gateway
    return {
        "requests": view.feed.peak / settings.max_requests,
        "buffers": min(1.0, view.buffers.peak / settings.buffer_bytes),
        "stream_buffer": min(1.0, view.counts.peak_outbox_bytes / settings.stream_buffer_bytes),
    }


GATEWAY: tuple[Family[Gateway], ...] = (
    Family(
        "tokenbus_gateway_connected_processors",
        "Processors that the gateway is connected to.",
        lambda view: sum(each.state is SessionState.OPEN for each in view.client.sessions),
    ),
    Family(
        "tokenbus_gateway_answers_total{route, status}",
        "Requests over HTTP; malformed HTTP counts as the route other.",
        lambda view: view.counts.requests,
    ),
    Family(
        "tokenbus_gateway_broken_answers_total{code}",
        "Answers that had begun, with status 200, and ended with an error event.",
        lambda view: view.counts.broken_answers,
    ),
    Family(
        "tokenbus_gateway_open_answers",
        "Answers that wait for tokens or are being sent.",
        lambda view: view.counts.open_answers,
    ),
    Family(
        "tokenbus_gateway_open_requests",
        "Open requests on the bus; an answer has one for each choice.",
        lambda view: len(view.feed),
    ),
    Family(
        "tokenbus_gateway_open_connections", "Connections of clients, idle ones too.", lambda view: view.connections
    ),
    Family("tokenbus_gateway_tokens_total", "Tokens of this gateway's requests.", lambda view: view.feed.tokens),
    Family(
        "tokenbus_gateway_aborted_requests_total",
        "Requests aborted because their client had gone or their answer had ended.",
        lambda view: view.feed.aborted,
    ),
    Family(
        "tokenbus_gateway_lost_clients_total{why}",
        "Clients that disconnected early (left), read nothing for too long (cut_off), sent too slowly (late), or were "
        "too many (refused).",
        lambda view: {
            "left": view.counts.left_clients,
            "cut_off": view.counts.cut_clients,
            "late": view.counts.late_requests,
            "refused": view.counts.refused_connections,
        },
    ),
    Family(
        "tokenbus_gateway_refusals_total{why}",
        "Refused requests: no_key and unknown_key (401), host (421), origin (403), rate and concurrency (429, of one "
        "key).",
        lambda view: view.counts.refusals,
    ),
    Family(
        "tokenbus_gateway_evicted_answers_total",
        "Answers that held the most while all together exceeded gateway.buffer_bytes.",
        lambda view: view.buffers.evicted,
    ),
    Family(
        "tokenbus_gateway_waiting_texts{lane}",
        "Texts that wait for an encoder, short ones (quick) or long and costly ones (slow).",
        lambda view: {name: lane.turns.waiting for name, lane in view.encoders.lanes.items()},
    ),
    Family(
        "tokenbus_gateway_ended_encoders_total{lane, why}",
        "Encoders that ended before their text was encoded: time or memory was used up, the client left or "
        "gateway.request_timeout_ms was over (left), or something else ended it (killed).",
        lambda view: {
            (name, why): count for name, lane in view.encoders.lanes.items() for why, count in lane.ended.copy().items()
        },
    ),
    Family(
        "tokenbus_gateway_unread_files",
        "Changed files of keys or certificates that cannot be read; the former ones stay in force.",
        lambda view: view.unread_files,
    ),
    Family("tokenbus_gateway_fill_ratio{of}", "How full each bounded thing is, from 0 to 1.", _fill),
    Family("tokenbus_gateway_peak_fill_ratio{of}", "The peak of each; stream_buffer is the fullest stream's.", _peaks),
    Family(
        "tokenbus_gateway_first_token_seconds",
        "From a request's arrival to its first token; to the whole answer if it is not streamed.",
        lambda view: view.counts.first_token,
        is_histogram=True,
    ),
    Family(
        "tokenbus_gateway_socket_latency_seconds",
        "From a row's publication to its write to the client's socket.",
        lambda view: view.counts.to_socket,
        is_histogram=True,
    ),
    Family(
        "tokenbus_gateway_event_loop_lag_seconds",
        "How late the gateway's event loop runs.",
        lambda view: view.watch.lag,
        is_histogram=True,
    ),
)
"""All metrics of a gateway."""


def _by_model(read: Callable[[ModelCounts], T]) -> Callable[[Gateway], Mapping[str, T]]:
    return lambda view: {model: read(counts) for model, counts in view.counts.models.copy().items()}


VLLM: tuple[Family[Gateway], ...] = (
    Family(
        "vllm:prompt_tokens_total{model_name}",
        "Tokens of the prompts of requests that ended.",
        _by_model(lambda counts: counts.prompt_tokens.sum),
    ),
    Family(
        "vllm:generation_tokens_total{model_name}",
        "Tokens of the answers of requests that ended.",
        _by_model(lambda counts: counts.generation_tokens.sum),
    ),
    Family(
        "vllm:request_success_total{finished_reason, model_name}",
        "Requests that ended, by why: stop, length, abort, error.",
        lambda view: {
            (reason, model): count
            for model, counts in view.counts.models.copy().items()
            for reason, count in counts.finished.copy().items()
        },
    ),
    Family(
        "vllm:request_prompt_tokens{model_name}",
        "How many tokens a request's prompt has.",
        _by_model(lambda counts: counts.prompt_tokens),
        is_histogram=True,
    ),
    Family(
        "vllm:request_generation_tokens{model_name}",
        "How many tokens a request's answer has.",
        _by_model(lambda counts: counts.generation_tokens),
        is_histogram=True,
    ),
    Family(
        "vllm:time_to_first_token_seconds{model_name}",
        "From a request's arrival to its first token.",
        _by_model(lambda counts: counts.first_token),
        is_histogram=True,
    ),
    Family(
        "vllm:e2e_request_latency_seconds{model_name}",
        "From a request's arrival to the end of its answer.",
        _by_model(lambda counts: counts.latency),
        is_histogram=True,
    ),
)
"""Metrics under vLLM's own names, for dashboards and autoscalers that know them, where they mean the same here."""


def metrics_page(gateway: Gateway) -> str:
    """Return the metrics of one process as text."""
    return generate_latest(gateway_collector(gateway)).decode()


def gateway_collector(gateway: Gateway) -> FamilyCollector[Gateway]:
    """Return the collector of a gateway."""
    return FamilyCollector("gateway", (*GATEWAY, *VLLM), lambda: gateway)
