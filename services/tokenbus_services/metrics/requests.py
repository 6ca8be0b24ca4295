"""The processor's metrics of requests, of what was refused, and of time."""

import numpy as np

from tokenbus_services.metrics.families import Family, Kind, Samples, one
from tokenbus_services.metrics.view import ProcessorView
from tokenbus_services.processor.requests import State

_STATES = {state.name.lower(): state for state in State if state is not State.CLOSED}


def _by_state(view: ProcessorView) -> Samples:
    counted = np.bincount(view.processor.registry.table.state, minlength=max(_STATES.values()) + 1)
    return (((name,), int(counted[state])) for name, state in _STATES.items())


def _each(counts: dict[str, int]) -> Samples:
    return (((name,), value) for name, value in counts.copy().items())


def _settled(view: ProcessorView) -> Samples:
    counts = view.processor.registry.router.counts
    names = ("delivered", "repeated", "late", "unknown", "early", "foreign")
    return (((name,), getattr(counts, name)) for name in names)


def _refused_by_side(view: ProcessorView) -> Samples:
    processor = view.processor
    yield ("worker",), processor.workers.refused
    yield ("step",), processor.intake.refused
    yield ("client",), processor.clients.refused
    yield ("transport",), processor.refused_connections


def _dead_letters(view: ProcessorView) -> Samples:
    yield ("kept",), view.processor.dead_letters.kept
    yield ("dropped",), view.processor.dead_letters.dropped


REQUESTS: tuple[Family[ProcessorView], ...] = (
    Family(
        Kind.GAUGE,
        "tokenbus_open_requests",
        "Requests that are open, by their state.",
        "ended or orphaned high: clients went away, or processors restart; handed_off high: decode workers are few.",
        _by_state,
        ("state",),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_peak_open_requests",
        "The most requests that were open at once, since the start.",
        "Near processor.max_requests: new ones are about to be refused; add processors, or raise the bound.",
        lambda view: one(view.processor.registry.table.peak),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_undispatched_requests",
        "Requests that wait for a worker to come.",
        "High: workers are slow to come back after a restart; then they end with the code no_worker.",
        lambda view: one(view.processor.dispatch.waiting),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_opened_requests_total",
        "Requests that began here.",
        "High: that is load.",
        lambda view: one(view.processor.registry.counts.opened),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_finished_requests_total",
        "Requests that had their last token.",
        "Falls behind opened_requests_total: requests end with errors, or pile up.",
        lambda view: one(view.processor.registry.counts.finished),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_failed_requests_total",
        "Requests that ended with an error, by its code.",
        "Moves: the code says what was lost: gap and worker_lost point at workers, slow_client at clients.",
        lambda view: _each(view.processor.registry.counts.failed),
        ("code",),
        'sum by (code) (increase(tokenbus_failed_requests_total{code!="aborted"}[5m])) > 0',
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_refused_requests_total",
        "Requests that were not taken, by the error that said why.",
        "overloaded or no_worker moves: add workers; invalid_request: look at the client.",
        lambda view: _each(view.processor.dispatch.refused),
        ("code",),
        'sum by (code) (increase(tokenbus_refused_requests_total{code=~"overloaded|no_worker"}[5m])) > 0',
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_unclaimed_requests_total",
        "Requests that workers had and that no client resumed in time; their tokens were dropped.",
        "Moves: clients die before their requests end, or cannot reach this processor.",
        lambda view: one(view.processor.registry.counts.unclaimed),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_settled_rows_total",
        "Rows by what became of them: only those that were delivered were new to a request.",
        "late or unknown moves steadily: workers go on with requests that ended; foreign: two have the same.",
        _settled,
        ("outcome",),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_refused_messages_total",
        "Messages that break the contract, by the rule they break.",
        "Moves: `tokenbus check` on the dead letters says which field of which message.",
        lambda view: _each(view.processor.dead_letters.by_rule),
        ("rule",),
        "sum by (rule) (increase(tokenbus_refused_messages_total[5m])) > 0",
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_refusals_total",
        "Refusals by side: a worker, a worker's step, a client, or a peer that the transport cut off.",
        "Moves: the log names the peer and the reason; client and transport on an open network: it is being probed.",
        _refused_by_side,
        ("side",),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_dead_letters_total",
        "Refused messages that were kept for people to look at, and those that were only counted.",
        "dropped moves: more come than dead_letters.per_second, one is too large, or the disk is full.",
        _dead_letters,
        ("outcome",),
        'increase(tokenbus_dead_letters_total{outcome="dropped"}[5m]) > 0',
    ),
)

TIMES: tuple[Family[ProcessorView], ...] = (
    Family(
        Kind.HISTOGRAM,
        "tokenbus_step_assembly_seconds",
        "From a step's first part to its hand-out.",
        "High: other parts or drafts come late; look at stream_open_steps.",
        lambda view: view.times.assembly,
        (),
        "histogram_quantile(0.99, sum by (le) (rate(tokenbus_step_assembly_seconds_bucket[5m]))) > 0.1",
    ),
    Family(
        Kind.HISTOGRAM,
        "tokenbus_delivery_latency_seconds",
        "From when a step's tokens were known at the worker to when they were handed to their requests.",
        "High: credit, network or this process's loop; compare event_loop_lag_seconds. Clocks that differ are in it.",
        lambda view: view.times.delivery,
        (),
        "histogram_quantile(0.99, sum by (le) (rate(tokenbus_delivery_latency_seconds_bucket[5m]))) > 0.1",
    ),
    Family(
        Kind.HISTOGRAM,
        "tokenbus_event_loop_lag_seconds",
        "How late the processor's event loop answers.",
        "High: the process lacks CPU time, or code in it that iterates over steps takes long.",
        lambda view: view.watch.lag,
        (),
        "histogram_quantile(0.99, sum by (le) (rate(tokenbus_event_loop_lag_seconds_bucket[5m]))) > 0.05",
    ),
)
