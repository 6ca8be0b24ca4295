"""The gateway's metrics: requests, waiting bytes, and the latency to clients' sockets."""

from collections.abc import Callable, Mapping
from typing import Any

from tokenbus.bus.link import SessionState
from tokenbus.gateway.fairness import MOST_WAITING
from tokenbus.gateway.gateway import Gateway, ModelCounts
from tokenbus.metrics.families import Family, FamilyCollector, Histogram, Samples, event_loop_lag, fill_ratio


def _fill(view: Gateway) -> Samples:
    settings = view.settings.gateway
    return {
        "requests": len(view.dispatcher) / settings.max_requests,
        "connections": view.connections / settings.most_connections,
        "buffers": view.buffers.size / view.buffers.most,
        "backlog": min(1.0, view.dispatcher.backlog.size / view.dispatcher.most_backlog),
        "bodies": view.bodies.size / view.bodies.most,
        **{f"{name}_texts": lane.turns.waiting / MOST_WAITING for name, lane in view.encoders.lanes.items()},
    }


GATEWAY: tuple[Family[Gateway], ...] = (
    fill_ratio(_fill),
    event_loop_lag(lambda view: view.watch.lag),
    Family(
        "tokenbus_gateway_connected_processors",
        "Processors to which the gateway is connected.",
        "If fewer than in bus.clients_address, the log says why. At 0, requests end with `deadline`.",
        lambda view: sum(each.state is SessionState.OPEN for each in view.client.sessions),
    ),
    Family(
        "tokenbus_gateway_answers_total{route, status}",
        "HTTP requests by route and status. Malformed requests have the route `other`.",
        "For 429 and 503, the gateway or the workers are overloaded. For other 5xx, see the log.",
        lambda view: view.counts.requests,
    ),
    Family(
        "tokenbus_gateway_broken_answers_total{code}",
        "Answers with status 200 that ended with an error event.",
        "For `slow_client`, clients read too slowly. For `worker_lost` and `gap`, check the workers.",
        lambda view: view.counts.broken_answers,
    ),
    Family(
        "tokenbus_gateway_tokens_total",
        "Tokens of this gateway's requests.",
        "If low, requests are few or workers are slow.",
        lambda view: view.dispatcher.tokens,
    ),
    Family(
        "tokenbus_gateway_lost_clients_total{why}",
        "Clients that left early, read nothing (cut_off), sent too slowly (late), or exceeded the connection limit "
        "(refused).",
        "`cut_off` and `late` mean slow networks or an attack. For `refused`, raise gateway.max_requests.",
        lambda view: {
            "left": view.counts.left_clients,
            "cut_off": view.counts.cut_clients,
            "late": view.counts.late_requests,
            "refused": view.counts.refused_connections,
        },
    ),
    Family(
        "tokenbus_gateway_refusals_total{why}",
        "Requests refused because of the key, host or origin.",
        "For `no_key` and `unknown_key`, the log names the peer. For `host` and `origin`, see gateway.hosts and "
        "gateway.origins. `rate` and `concurrency` are the key's limits.",
        lambda view: view.counts.refusals,
    ),
    Family(
        "tokenbus_gateway_ignored_fields_total{field}",
        "Bodies with an ignored unknown field, by the field's path. All fields after 256 count as `(others)`.",
        "The field has no effect, even if a client relies on it.",
        lambda view: view.counts.ignored_fields,
    ),
    Family(
        "tokenbus_gateway_bridged_turns_total{result}",
        "Later turns of sessions, by the use of the last turn, and stored turns that were `dropped`.",
        "For `unknown`, the history was edited, or the turn was dropped or at another gateway. For `refused`, the "
        "template writes another text.",
        lambda view: {"dropped": view.turns.dropped, **view.counts.bridged_turns},
    ),
    Family(
        "tokenbus_gateway_evicted_answers_total",
        "Largest answers, ended because all answers together exceeded gateway.buffer_bytes.",
        "Clients do not read, or request more than this gateway can write.",
        lambda view: view.buffers.evicted,
    ),
    Family(
        "tokenbus_gateway_ended_encoders_total{lane, why}",
        "Encoders that ended before their text was encoded.",
        "For `killed`, the request got 503, often for lack of memory. `time` and `memory` in the slow lane mean costly "
        "texts or an attack.",
        lambda view: {
            (name, why): count for name, lane in view.encoders.lanes.items() for why, count in lane.ended.copy().items()
        },
    ),
    Family(
        "tokenbus_gateway_unread_files",
        "Unreadable files of keys or certificates, whose earlier contents stay in use.",
        "Above 0, revoked keys may still be accepted. The log names the file.",
        lambda view: view.unread_files,
    ),
    Family(
        "tokenbus_gateway_socket_latency_seconds",
        "Time from a row's publication to its write to the client's socket.",
        "If high, check the event loop and the clocks. Fewer alternatives or columns cost less.",
        lambda view: view.counts.to_socket,
        is_histogram=True,
    ),
)


def _of_models(name: str, says: str, read: Callable[[ModelCounts], float | Histogram]) -> Family[Gateway]:
    """Return a metric family with a value or a histogram for each model."""

    def values(view: Gateway) -> Mapping[str, Any]:
        return {model: read(counts) for model, counts in view.counts.models.copy().items()}

    return Family(f"vllm:{name}{{model_name}}", says, "", values, is_histogram=not name.endswith("_total"))


def _open(view: Gateway, column: int) -> Mapping[str, float]:
    counts = view.dispatcher.running_and_waiting()
    return {model: counts.get(model, (0, 0))[column] for model in {**view.reader.models, **counts}}


def _finished(view: Gateway) -> Samples:
    models = view.counts.models.copy().items()
    return {(why, model): count for model, counts in models for why, count in counts.finished.copy().items()}


VLLM: tuple[Family[Gateway], ...] = (
    Family(
        "vllm:num_requests_running{model_name}",
        "Open requests of this gateway with at least one token.",
        "",
        lambda view: _open(view, 0),
    ),
    Family(
        "vllm:num_requests_waiting{model_name}",
        "Open requests of this gateway without a token, which are queued or in prefill.",
        "",
        lambda view: _open(view, 1),
    ),
    Family(
        "vllm:kv_cache_usage_perc{engine, model_name}",
        "Usage of a worker's KV cache, from 0 to 1, if the engine reports it.",
        "",
        lambda view: view.cache_usage,
    ),
    _of_models("prompt_tokens_total", "Prompt tokens of ended requests.", lambda of: of.prompt_tokens.sum),
    _of_models("generation_tokens_total", "Answer tokens of ended requests.", lambda of: of.generation_tokens.sum),
    Family(
        "vllm:request_success_total{finished_reason, model_name}",
        "Ended requests by reason: stop, length, abort, error.",
        "",
        _finished,
    ),
    _of_models("request_prompt_tokens", "Number of prompt tokens of a request.", lambda of: of.prompt_tokens),
    _of_models("request_generation_tokens", "Number of answer tokens of a request.", lambda of: of.generation_tokens),
    _of_models("request_params_max_tokens", "The max_tokens of requests that set it.", lambda of: of.most_tokens),
    _of_models(
        "request_time_per_output_token_seconds",
        "Time from the first token of a request to the end, divided by the number of tokens after the first.",
        lambda of: of.token_time,
    ),
    _of_models(
        "time_to_first_token_seconds", "Time from a request's arrival to its first token.", lambda of: of.first_token
    ),
    _of_models(
        "e2e_request_latency_seconds", "Time from a request's arrival to the end of its answer.", lambda of: of.latency
    ),
)
"""Metrics with vLLM's names and meanings, for existing dashboards and autoscalers."""


def gateway_collector(gateway: Gateway) -> FamilyCollector[Gateway]:
    return FamilyCollector("gateway", (*GATEWAY, *VLLM), lambda: gateway)
