"""The dashboard for Grafana: every metric in a panel, in rows as an operator asks."""

import json
import re
from dataclasses import dataclass
from itertools import count

from tokenbus_services.metrics.document import ACCEPTANCE, EFFICIENCY, HEADS, families

DATASOURCE = "tokenbus-prometheus"
_HEIGHT, _WIDTH, _COLUMNS = 8, 8, 24
_RANGE = "[$__rate_interval]"
_OF_WORKER = '{worker=~"$worker"}'


@dataclass(frozen=True, slots=True)
class Panel:
    """A few queries in one picture; each has its legend."""

    title: str
    unit: str
    queries: dict[str, str]


def _rate(metric: str, by: str = "worker", where: str = "") -> str:
    return f"sum by ({by}) (rate(tokenbus_{metric}_total{where}{_RANGE}))"


def _stream(metric: str) -> str:
    return f"tokenbus_{metric}{_OF_WORKER}"


def _quantiles(metric: str) -> dict[str, str]:
    rates = f"sum by (le) (rate(tokenbus_{metric}_bucket{_RANGE}))"
    return {f"p{share:g}": f"histogram_quantile({share / 100:g}, {rates})" for share in (50, 99, 99.9)}


def _by_worker(title: str, unit: str, metric: str) -> Panel:
    return Panel(title, unit, {"{{worker}}": _stream(metric)})


def _moves(title: str, *metrics: str) -> Panel:
    increases = {
        f"{{{{worker}}}} {name.split('_', 1)[1].replace('_', ' ')}": (
            f"increase(tokenbus_{name}_total{_OF_WORKER}{_RANGE})"
        )
        for name in metrics
    }
    return Panel(title, "short", increases)


ROWS: dict[str, tuple[Panel, ...]] = {
    "Overview": (
        Panel("Tokens to requests", "cps", {"{{worker}}": _rate("stream_tokens")}),
        Panel("Open requests", "short", {"{{state}}": "tokenbus_open_requests"}),
        Panel("Requests that end with an error", "cps", {"{{code}}": _rate("failed_requests", "code")}),
        Panel(
            "Workers and clients",
            "short",
            {"workers {{state}}": "tokenbus_known_workers", "clients {{state}}": "tokenbus_known_clients"},
        ),
        Panel(
            "Connections to the processor",
            "short",
            {"{{state}}": "tokenbus_bus_connections", "addresses that are gone": "tokenbus_unreachable_addresses"},
        ),
        Panel(
            "Connections that were cut off",
            "cps",
            {
                "{{bound}}": _rate("cut_connections", "bound"),
                "{{worker}} hand-offs": _rate("worker_refused_connections", where=_OF_WORKER),
            },
        ),
        Panel(
            "Came in and not read",
            "bytes",
            {"now": "tokenbus_pending_bytes", "peak": "tokenbus_peak_pending_bytes"},
        ),
        Panel("Open requests of each worker", "short", {"{{worker}} {{role}}": "tokenbus_worker_assigned_requests"}),
        Panel("How full each bound is", "percentunit", {"{{of}}": "tokenbus_fill_ratio"}),
        Panel("Step made to step delivered", "s", _quantiles("delivery_latency_seconds")),
    ),
    "Streams": (
        Panel("Items", "cps", {"{{worker}}": _rate("stream_items", where=_OF_WORKER)}),
        Panel("Payload", "Bps", {"{{worker}}": _rate("stream_bytes", where=_OF_WORKER)}),
        Panel("Steps", "cps", {"{{worker}}": _rate("stream_steps", where=_OF_WORKER)}),
        Panel("Rows", "cps", {"{{worker}}": _rate("stream_rows", where=_OF_WORKER)}),
        _by_worker("Since the last step was made", "s", "stream_lag_seconds"),
        _by_worker("Sent and not in order yet", "short", "stream_lag_items"),
        _by_worker("Credit left, items", "short", "stream_credit_items"),
        _by_worker("Credit left, bytes", "bytes", "stream_credit_bytes"),
        _by_worker("Steps that wait for parts", "short", "stream_open_steps"),
        Panel(
            "Held by consumers, items",
            "short",
            {
                "{{worker}}": _stream("stream_pending_ack_items"),
                "{{worker}} peak": _stream("stream_peak_pending_ack_items"),
            },
        ),
        _by_worker("Held by consumers, bytes", "bytes", "stream_pending_ack_bytes"),
    ),
    "Workers": (
        Panel("Connected to a processor", "short", {"{{worker}}": _stream("worker_connected_processors")}),
        Panel("Published items", "cps", {"{{worker}}": _rate("worker_published_items", where=_OF_WORKER)}),
        Panel("Published payload", "Bps", {"{{worker}}": _rate("worker_published_bytes", where=_OF_WORKER)}),
        Panel(
            "Retained, items",
            "short",
            {
                "{{worker}}": _stream("worker_retained_items"),
                "{{worker}} peak": _stream("worker_peak_retained_items"),
            },
        ),
        Panel(
            "Retained, bytes",
            "bytes",
            {
                "{{worker}}": _stream("worker_retained_bytes"),
                "{{worker}} peak": _stream("worker_peak_retained_bytes"),
                "{{worker}} states handed off to it": _stream("worker_waiting_state_bytes"),
            },
        ),
        _by_worker("How full retention is", "percentunit", "worker_retention_ratio"),
        Panel(
            "What the policy did",
            "cps",
            {"{{worker}} {{action}}": _rate("worker_policy_batches", "worker, action", _OF_WORKER)},
        ),
        Panel(
            "Requests that changed hands",
            "cps",
            {"{{worker}} {{outcome}}": _rate("worker_handoff_requests", "worker, outcome", _OF_WORKER)},
        ),
        Panel("Engine waited", "percentunit", {"{{worker}}": _rate("worker_blocked_seconds", where=_OF_WORKER)}),
        Panel(
            "Credit left",
            "short",
            {
                "{{worker}} items": _stream("worker_credit_items"),
                "{{worker}} bytes": _stream("worker_credit_bytes"),
            },
        ),
        Panel(
            "Requests at workers",
            "short",
            {
                "{{worker}} open": _stream("worker_open_requests"),
                "{{worker}} not looked at": _stream("worker_waiting_requests"),
                "{{worker}} handed off, not answered": _stream("worker_unanswered_requests"),
            },
        ),
    ),
    "Requests": (
        Panel(
            "Requests that begin and end",
            "cps",
            {
                "opened": f"sum(rate(tokenbus_opened_requests_total{_RANGE}))",
                "finished": f"sum(rate(tokenbus_finished_requests_total{_RANGE}))",
                "unclaimed": f"sum(rate(tokenbus_unclaimed_requests_total{_RANGE}))",
            },
        ),
        Panel("Requests that are not taken", "cps", {"{{code}}": _rate("refused_requests", "code")}),
        Panel(
            "Waiting and peak",
            "short",
            {"wait for a worker": "tokenbus_undispatched_requests", "peak open": "tokenbus_peak_open_requests"},
        ),
        Panel("Rows by what became of them", "cps", {"{{outcome}}": _rate("settled_rows", "outcome")}),
    ),
    "Loss and healing": (
        _moves("Lost", "stream_lost_items", "stream_gaps", "stream_incomplete_steps", "stream_missing_drafts"),
        _moves("Asked for again", "stream_replays", "worker_replayed_items", "worker_handshakes"),
        _moves("Dropped as known", "stream_duplicate_items", "stream_duplicate_parts"),
        _moves("Different or damaged", "stream_divergent_items", "stream_damaged_items", "stream_refused_items"),
        _moves(
            "No room at a worker, frames refused by it, failed steps",
            "worker_unpublished_rows",
            "worker_refused_frames",
            "worker_failed_steps",
            "worker_engine_failed_requests",
        ),
        Panel(
            "Messages refused, by rule",
            "short",
            {"{{rule}}": f"sum by (rule) (increase(tokenbus_refused_messages_total{_RANGE}))"},
        ),
        Panel(
            "Refused, by side",
            "short",
            {"{{side}}": f"sum by (side) (increase(tokenbus_refusals_total{_RANGE}))"},
        ),
        Panel(
            "Dead letters",
            "short",
            {"{{outcome}}": f"sum by (outcome) (increase(tokenbus_dead_letters_total{_RANGE}))"},
        ),
        Panel("Workers gone", "short", {"gone": f"sum(increase(tokenbus_gone_workers_total{_RANGE}))"}),
        Panel(
            "Refused and evicted peers",
            "short",
            {
                "{{side}} {{reason}}": f"sum by (side, reason) (increase(tokenbus_refused_peers_total{_RANGE}))",
                "resumes": f"sum(increase(tokenbus_refused_resumes_total{_RANGE}))",
                "evicted clients": f"sum(increase(tokenbus_evicted_clients_total{_RANGE}))",
                "failed ticks": f"sum(increase(tokenbus_failed_ticks_total{_RANGE}))",
            },
        ),
    ),
    "Latency": (
        Panel("Step made to step delivered", "s", _quantiles("delivery_latency_seconds")),
        Panel("First part to hand-out", "s", _quantiles("step_assembly_seconds")),
        Panel("Processor's event loop is late", "s", _quantiles("event_loop_lag_seconds")),
        Panel("Workers' event loops are late", "s", _quantiles("worker_event_loop_lag_seconds")),
    ),
    "Speculative decoding": (
        Panel("Draft acceptance rate", "percentunit", {"accepted / drafted": ACCEPTANCE}),
        Panel("Efficiency", "percentunit", {"emitted / most": EFFICIENCY}),
        Panel("Acceptance rate of each head", "percentunit", {"head {{head}}": HEADS}),
        Panel(
            "Tokens",
            "cps",
            {
                "drafted": f"sum(rate(tokenbus_speculative_draft_tokens_total{_RANGE}))",
                "accepted": f"sum(rate(tokenbus_speculative_accepted_tokens_total{_RANGE}))",
                "emitted": f"sum(rate(tokenbus_speculative_emitted_tokens_total{_RANGE}))",
            },
        ),
        Panel(
            "Since the start, by worker",
            "percentunit",
            {
                "{{worker}} acceptance": _stream("speculative_acceptance_ratio"),
                "{{worker}} efficiency": _stream("speculative_efficiency_ratio"),
            },
        ),
        Panel(
            "Heads since the start, by worker",
            "percentunit",
            {"{{worker}} head {{head}}": _stream("speculative_head_acceptance_ratio")},
        ),
    ),
    "Clients": (
        Panel(
            "SendQueues, frames",
            "short",
            {"of all": "tokenbus_send_queue_frames", "peak of one": "tokenbus_peak_send_queue_frames"},
        ),
        Panel("SendQueues, bytes", "bytes", {"of all": "tokenbus_send_queue_bytes"}),
        Panel(
            "Rows and steps that wait in the processor",
            "short",
            {
                "rows": "tokenbus_buffered_rows",
                "rows of one request": "tokenbus_fullest_buffer_rows",
                "steps": "tokenbus_queued_steps",
                "steps, peak": "tokenbus_peak_queued_steps",
            },
        ),
        Panel("How full each bound was at most", "percentunit", {"{{of}}": "tokenbus_peak_fill_ratio"}),
        Panel(
            "Watching",
            "short",
            {
                "clients that watch": "tokenbus_watching_clients",
                "items skipped": f"sum(increase(tokenbus_watch_skipped_items_total{_RANGE}))",
            },
        ),
    ),
    "Gateway": (
        Panel(
            "Answers by status, and those that broke off",
            "cps",
            {
                "{{route}} {{status}}": _rate("gateway_answers", "route, status"),
                "broken {{code}}": _rate("gateway_broken_answers", "code"),
                "refused {{why}}": _rate("gateway_refusals", "why"),
                "evicted": f"sum(rate(tokenbus_gateway_evicted_answers_total{_RANGE}))",
            },
        ),
        Panel("Tokens through gateways", "cps", {"all": f"sum(rate(tokenbus_gateway_tokens_total{_RANGE}))"}),
        Panel(
            "Open",
            "short",
            {
                "answers": "tokenbus_gateway_open_answers",
                "requests": "tokenbus_gateway_open_requests",
                "connections": "tokenbus_gateway_open_connections",
                "processors": "tokenbus_gateway_connected_processors",
                "unread files": "tokenbus_gateway_unread_files",
            },
        ),
        Panel("Time to the first token", "s", _quantiles("gateway_first_token_seconds")),
        Panel("Row published to socket", "s", _quantiles("gateway_socket_latency_seconds")),
        Panel("How late the gateway's event loop is", "s", _quantiles("gateway_event_loop_lag_seconds")),
        Panel(
            "Clients that were lost",
            "short",
            {
                "{{why}}": f"sum by (why) (increase(tokenbus_gateway_lost_clients_total{_RANGE}))",
                "requests aborted": f"sum(increase(tokenbus_gateway_aborted_requests_total{_RANGE}))",
            },
        ),
        Panel(
            "How full the gateway's bounds are",
            "percentunit",
            {"{{of}}": "tokenbus_gateway_fill_ratio", "{{of}} peak": "tokenbus_gateway_peak_fill_ratio"},
        ),
    ),
    "Process": (
        Panel("CPU", "percentunit", {"{{job}} {{instance}}": f"rate(process_cpu_seconds_total{_RANGE})"}),
        Panel("Memory", "bytes", {"{{job}} {{instance}}": "process_resident_memory_bytes"}),
        Panel("Open files", "short", {"{{job}} {{instance}}": "process_open_fds"}),
        Panel("Up since", "s", {"{{job}} {{instance}}": "time() - process_start_time_seconds"}),
        Panel("Version", "short", {"{{service}} {{version}} {{instance}}": "tokenbus_build_info"}),
    ),
}


def dashboard() -> str:
    """Return the dashboard as Grafana imports it."""
    model = {
        "uid": "tokenbus",
        "title": "Tokenbus",
        "description": "Written by `python -m tokenbus_services.metrics dashboard`; a test holds it equal.",
        "tags": ["tokenbus"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_WORKERS]},
        "panels": _panels(),
    }
    return json.dumps(model, indent=2) + "\n"


_SOURCE = {"type": "prometheus", "uid": DATASOURCE}
_WORKERS = {
    "name": "worker",
    "label": "Worker",
    "type": "query",
    "datasource": _SOURCE,
    "query": {"query": "label_values(tokenbus_stream_items_total, worker)", "refId": "workers"},
    "refresh": 2,
    "includeAll": True,
    "multi": True,
    "current": {"text": "All", "value": "$__all"},
}


def _panels() -> list[dict[str, object]]:
    ids, top = count(1), 0
    found: list[dict[str, object]] = []
    for name, panels in ROWS.items():
        place = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
        found.append({"id": next(ids), "type": "row", "title": name, "collapsed": False, "gridPos": place})
        top += 1
        for number, panel in enumerate(panels):
            line, column = divmod(number, _COLUMNS // _WIDTH)
            place = {"x": column * _WIDTH, "y": top + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            found.append(_panel(panel, next(ids), place))
        top += -(-len(panels) // (_COLUMNS // _WIDTH)) * _HEIGHT
    return found


def _panel(panel: Panel, identity: int, place: dict[str, int]) -> dict[str, object]:
    targets = [
        {"refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
        for number, (legend, query) in enumerate(panel.queries.items())
    ]
    defaults = {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 10, "showPoints": "never"}}
    return {
        "id": identity,
        "type": "timeseries",
        "title": panel.title,
        "description": _about(panel),
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def _about(panel: Panel) -> str:
    named = set(re.findall(r"[a-z_]+", " ".join(panel.queries.values())))
    return "\n\n".join(family.help for family in families() if {family.name, f"{family.name}_bucket"} & named)
