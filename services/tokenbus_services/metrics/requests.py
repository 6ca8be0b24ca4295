"""The processor's metrics of requests, of what was refused, and of time."""

import numpy as np

from tokenbus_services.metrics.families import Family, Samples, counter, each, gauge, histogram
from tokenbus_services.metrics.view import ProcessorView
from tokenbus_services.processor.requests import State

_STATES = {state.name.lower(): state for state in State if state is not State.CLOSED}


def _by_state(view: ProcessorView) -> Samples:
    counted = np.bincount(view.processor.registry.table.state, minlength=max(_STATES.values()) + 1)
    return (((name,), int(counted[state])) for name, state in _STATES.items())


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


REQUESTS: tuple[Family[ProcessorView], ...] = (
    gauge("tokenbus_open_requests", "Requests that are open, by their state.", _by_state, "state"),
    gauge(
        "tokenbus_peak_open_requests",
        "The most requests that were open at once, since the start.",
        lambda view: view.processor.registry.table.peak,
    ),
    gauge(
        "tokenbus_undispatched_requests",
        "Requests that wait for a worker to come.",
        lambda view: view.processor.dispatch.waiting,
    ),
    counter(
        "tokenbus_opened_requests_total",
        "Requests that began here.",
        lambda view: view.processor.registry.counts.opened,
    ),
    counter(
        "tokenbus_finished_requests_total",
        "Requests that had their last token.",
        lambda view: view.processor.registry.counts.finished,
    ),
    counter(
        "tokenbus_failed_requests_total",
        "Requests that ended with an error, by its code.",
        lambda view: each(view.processor.registry.counts.failed),
        "code",
    ),
    counter(
        "tokenbus_refused_requests_total",
        "Requests that were not taken, by the error that said why.",
        lambda view: each(view.processor.dispatch.refused),
        "code",
    ),
    counter(
        "tokenbus_unclaimed_requests_total",
        "Requests that workers had and that no client resumed in time; their tokens were dropped.",
        lambda view: view.processor.registry.counts.unclaimed,
    ),
    counter(
        "tokenbus_settled_rows_total",
        "Rows by what became of them: only those that were delivered were new to a request.",
        _settled,
        "outcome",
    ),
    counter(
        "tokenbus_refused_messages_total",
        "Messages that break the contract, by the rule they break.",
        lambda view: each(view.processor.dead_letters.by_rule),
        "rule",
    ),
    counter(
        "tokenbus_refusals_total",
        "Refusals by side: a worker, a worker's step, a client, or a peer that the transport cut off.",
        _refused_by_side,
        "side",
    ),
    counter(
        "tokenbus_dead_letters_total",
        "Refused messages that were kept for people to look at, and those that were only counted.",
        lambda view: each({name: getattr(view.processor.dead_letters, name) for name in ("kept", "dropped")}),
        "outcome",
    ),
)

TIMES: tuple[Family[ProcessorView], ...] = (
    histogram(
        "tokenbus_step_assembly_seconds",
        "From a step's first part to its hand-out.",
        lambda view: view.times.assembly,
    ),
    histogram(
        "tokenbus_delivery_latency_seconds",
        "From when a step's tokens were known at the worker to when they were handed to their requests.",
        lambda view: view.times.delivery,
    ),
    histogram(
        "tokenbus_event_loop_lag_seconds",
        "How late the processor's event loop answers.",
        lambda view: view.watch.lag,
    ),
)
