"""The processor's metrics, of streams, requests, times, peers, draft models and the durable log, and its health."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tokenbus_contracts.generated.stream_pb2 import WorkerRole
from tokenbus_services.metrics.families import Family, FamilyCollector, Samples, families
from tokenbus_services.metrics.health import Health, LoopWatch, stalled
from tokenbus_services.metrics.server import MetricsServer
from tokenbus_services.metrics.view import ProcessorView, StepTimes
from tokenbus_services.processor import Processor
from tokenbus_services.processor.requests import State
from tokenbus_services.processor.session import Session
from tokenbus_services.processor.speculation import Speculation, ratio
from tokenbus_services.processor.stream import StreamCounts
from tokenbus_services.processor.workers import Worker

if TYPE_CHECKING:
    from tokenbus_services.processor.item_log import ItemLog

_Families = Iterator[Family[ProcessorView]]
_STATES = {state.name.lower(): state for state in State if state is not State.CLOSED}


# Each of the following makes families of rows: a title, a help text, and how a value is read of what the rows are of.


def _of_counts(*rows: tuple[str, str, Callable[[StreamCounts], float]]) -> _Families:
    return families(rows, lambda read, view: {name: read(of) for name, of in view.counts.items()})


def _of_workers(*rows: tuple[str, str, Callable[[Worker], float]]) -> _Families:
    return families(rows, lambda read, view: {of.stream.worker_id: read(of) for of in view.workers})


def _of_processor(*rows: tuple[str, str, Callable[[Processor], float | Samples]]) -> _Families:
    return families(rows, lambda read, view: read(view.processor))


def _of_speculation(*rows: tuple[str, str, Callable[[Speculation], float | None]]) -> _Families:
    return families(rows, _where_speculated)


def _of_heads(*rows: tuple[str, str, Callable[[int, int], float]]) -> _Families:
    return families(rows, _by_head)


def _of_log(*rows: tuple[str, str, Callable[["ItemLog"], float | Samples]]) -> _Families:
    """Make families that have no values where there is no durable log."""
    return families(rows, lambda read, view: {} if (log := view.processor.item_log) is None else read(log))


def _where_speculated(read: Callable[[Speculation], float | None], view: ProcessorView) -> Samples:
    values = {worker: read(counts.speculation) for worker, counts in view.counts.items()}
    return {worker: value for worker, value in values.items() if value is not None}


def _by_head(read: Callable[[int, int], float], view: ProcessorView) -> Samples:
    return {
        (worker, str(head)): read(drafted, accepted)
        for worker, counts in view.counts.items()
        for head, drafted, accepted in counts.speculation.heads()
    }


def _by_state(processor: Processor) -> Samples:
    counted = np.bincount(processor.registry.table.state, minlength=max(_STATES.values()) + 1)
    return {name: int(counted[state]) for name, state in _STATES.items()}


def _settled(processor: Processor) -> Samples:
    names = ("delivered", "repeated", "late", "unknown", "early", "foreign")
    return {name: getattr(processor.registry.router.counts, name) for name in names}


def _by_presence(peers: Sequence[Worker | Session]) -> Samples:
    connected = sum(peer.peer is not None for peer in peers)
    return {"connected": connected, "away": len(peers) - connected}


def _assigned(view: ProcessorView) -> Samples:
    found = {}
    for worker in view.workers:
        hello = worker.stream.hello
        role = WorkerRole.Name(hello.role).removeprefix("WORKER_ROLE_").lower()
        state = "away" if worker.peer is None else "connected"
        labels = worker.stream.worker_id, role, hello.model, str(worker.stream.epoch), state
        found[labels] = view.processor.registry.table.load_of(worker.source.stream)
    return found


def _refused_peers(processor: Processor) -> Samples:
    return {
        (side, reason): refused
        for side, peers in (("worker", processor.worker_connections), ("client", processor.clients))
        for reason, refused in peers.refusals.copy().items()
    }


PROCESSOR: tuple[Family[ProcessorView], ...] = (
    *_of_counts(
        ("tokenbus_stream_items_total{worker}", "Items from a worker, repeated ones too.", lambda of: of.items),
        ("tokenbus_stream_bytes_total{worker}", "Payload bytes of those items.", lambda of: of.bytes),
        ("tokenbus_stream_steps_total{worker}", "Steps of a worker that were handed out.", lambda of: of.steps),
        ("tokenbus_stream_rows_total{worker}", "Rows of a worker that were new to their requests.", lambda of: of.rows),
        ("tokenbus_stream_tokens_total{worker}", "Tokens of a worker for requests.", lambda of: of.tokens),
    ),
    Family(
        "tokenbus_stream_lag_seconds{worker}",
        "How long ago the last step that was handed out was made, by the worker's clock.",
        lambda view: view.lags(),
    ),
    *_of_workers(
        ("tokenbus_stream_lag_items{worker}", "Items sent and not in order here yet.", lambda of: of.stream.lag),
        ("tokenbus_stream_credit_items{worker}", "Items that it may send.", lambda of: of.stream.credit_left[0]),
        ("tokenbus_stream_credit_bytes{worker}", "Bytes that it may send.", lambda of: of.stream.credit_left[1]),
        ("tokenbus_stream_pending_items{worker}", "Items that wait for consumers.", lambda of: len(of.stream.acks)),
        ("tokenbus_stream_pending_bytes{worker}", "Payload bytes of those items.", lambda of: of.stream.acks.bytes),
        ("tokenbus_stream_peak_pending_items{worker}", "Their peak, since it came.", lambda of: of.stream.acks.peak),
        (
            "tokenbus_stream_open_steps{worker}",
            "Steps that wait for their other parts or their draft.",
            lambda of: of.assembler.open_steps,
        ),
    ),
    *_of_counts(
        ("tokenbus_stream_gaps_total{worker}", "Runs of items that were lost.", lambda of: of.gaps),
        ("tokenbus_stream_lost_items_total{worker}", "Items that were lost.", lambda of: of.lost),
        ("tokenbus_stream_replays_total{worker}", "Requests for missing items.", lambda of: of.replays),
        ("tokenbus_stream_duplicate_items_total{worker}", "Repeated items, dropped.", lambda of: of.duplicates),
        (
            "tokenbus_stream_duplicate_parts_total{worker}",
            "Parts of steps that came in another item before, dropped.",
            lambda of: of.repeated_parts,
        ),
        (
            "tokenbus_stream_divergent_items_total{worker}",
            "Repeated items and parts with other contents; the first is what counts.",
            lambda of: of.divergences + of.divergent_parts,
        ),
        (
            "tokenbus_stream_damaged_items_total{worker}",
            "Items with a wrong checksum; they are asked for again.",
            lambda of: of.damaged,
        ),
        ("tokenbus_stream_refused_items_total{worker}", "Items that break the contract.", lambda of: of.refused),
        (
            "tokenbus_stream_incomplete_steps_total{worker}",
            "Steps that were given up before all of their rows came.",
            lambda of: of.incomplete_steps,
        ),
    ),
    Family(
        "tokenbus_stream_missing_drafts_total{worker}",
        "Steps whose announced draft came too late or did not match.",
        lambda view: view.missing_drafts(),
    ),
    *_of_processor(
        ("tokenbus_open_requests{state}", "Open requests by state.", _by_state),
        ("tokenbus_peak_open_requests", "The most open requests since the start.", lambda of: of.registry.table.peak),
        ("tokenbus_undispatched_requests", "Requests that wait for a worker to come.", lambda of: of.dispatch.waiting),
        ("tokenbus_opened_requests_total", "Requests that began here.", lambda of: of.registry.counts.opened),
        ("tokenbus_finished_requests_total", "Requests with their last token.", lambda of: of.registry.counts.finished),
        ("tokenbus_failed_requests_total{code}", "Requests ended by an error.", lambda of: of.registry.counts.failed),
        ("tokenbus_refused_requests_total{code}", "Requests that were not taken.", lambda of: of.dispatch.refused),
        (
            "tokenbus_unclaimed_requests_total",
            "Workers' requests that no client resumed in time; their tokens were dropped.",
            lambda of: of.registry.counts.unclaimed,
        ),
        (
            "tokenbus_settled_rows_total{outcome}",
            "Rows by what became of them: only those that were delivered were new to a request.",
            _settled,
        ),
        (
            "tokenbus_refused_messages_total{rule}",
            "Messages that break the contract, by the rule they break.",
            lambda of: of.refused_messages.by_rule,
        ),
        (
            "tokenbus_refusals_total{side}",
            "Refusals by side: a worker, a worker's step, a client, or a peer that the transport cut off.",
            lambda of: {
                "worker": of.worker_connections.refused,
                "step": of.intake.refused,
                "client": of.clients.refused,
                "transport": of.refused_connections,
            },
        ),
    ),
    Family(
        "tokenbus_step_assembly_seconds",
        "From a step's first part to its hand-out.",
        lambda view: view.times.assembly,
        is_histogram=True,
    ),
    Family(
        "tokenbus_delivery_latency_seconds",
        "From when a worker knew a step's tokens to their hand-out to requests.",
        lambda view: view.times.delivery,
        is_histogram=True,
    ),
    Family(
        "tokenbus_event_loop_lag_seconds",
        "How late the processor's event loop answers.",
        lambda view: view.watch.lag,
        is_histogram=True,
    ),
    *_of_processor(
        (
            "tokenbus_unreachable_addresses",
            "Of the processor's two addresses those whose socket file was removed or replaced.",
            lambda of: len(of.unreachable),
        ),
        (
            "tokenbus_bus_connections{state}",
            "Connections by whether their peer has introduced itself.",
            lambda of: {"admitted": of.usage().admitted, "unadmitted": of.usage().unadmitted},
        ),
        (
            "tokenbus_cut_connections_total{bound}",
            "Connections cut off for a bound: bytes, connections, silent, id, or accept (no descriptor was left).",
            lambda of: of.usage().cut_off,
        ),
        (
            "tokenbus_dropped_frames_total{peer}",
            "Over NATS: frames that the processor dropped, by the name of their peers, the 64 with the most.",
            lambda of: of.usage().dropped,
        ),
        ("tokenbus_pending_bytes", "Bytes over tcp that were not read yet.", lambda of: of.usage().pending_bytes),
    ),
    Family(
        "tokenbus_known_workers{state}",
        "Workers that are connected, and those that are away and not given up yet.",
        lambda view: _by_presence(view.workers),
    ),
    Family(
        "tokenbus_worker_assigned_requests{worker, role, model, epoch, state}",
        "Open requests of each worker, with its role, model, epoch, and whether it is connected or away.",
        _assigned,
    ),
    *_of_processor(
        ("tokenbus_gone_workers_total", "Workers that left or were given up.", lambda of: of.workers.lost),
    ),
    Family(
        "tokenbus_known_clients{state}",
        "Clients that are connected, and those that are away and may come back.",
        lambda view: _by_presence(view.sessions),
    ),
    *_of_processor(
        (
            "tokenbus_refused_peers_total{side, reason}",
            "Refused workers and clients: a key without the right, a name or a session that another has.",
            _refused_peers,
        ),
        (
            "tokenbus_commands_total{command, outcome}",
            "Operators' commands that were answered: done, refused, or lost with their worker.",
            lambda of: dict(of.clients.commands.answers),
        ),
        ("tokenbus_open_commands", "Commands that no worker has answered yet.", lambda of: len(of.clients.commands)),
        (
            "tokenbus_refused_resumes_total",
            "Resumed requests that are another client's.",
            lambda of: of.registry.counts.refused_resumes,
        ),
        (
            "tokenbus_evicted_clients_total",
            "How often a client lost its requests because too much waited for it.",
            lambda of: of.clients.evicted,
        ),
        ("tokenbus_failed_ticks_total", "Failed checks of one peer or request, a defect.", lambda of: of.failed_ticks),
        ("tokenbus_watching_clients", "Clients shown whole streams.", lambda of: len(of.clients.watchers)),
        (
            "tokenbus_watch_skipped_items_total",
            "Items not shown to a client that watches and reads too slowly; requests are not affected.",
            lambda of: of.clients.watchers.skipped_items,
        ),
    ),
    Family(
        "tokenbus_send_queue_frames",
        "Frames that all clients together have not acknowledged.",
        lambda view: sum(len(session.send_queue) for session in view.sessions),
    ),
    Family(
        "tokenbus_send_queue_bytes",
        "Bytes of those frames.",
        lambda view: sum(session.send_queue.bytes for session in view.sessions),
    ),
    Family(
        "tokenbus_peak_send_queue_frames",
        "The most frames that waited for one of the clients that are here.",
        lambda view: max((session.send_queue.peak for session in view.sessions), default=0),
    ),
    Family(
        "tokenbus_buffered_rows",
        "Rows that wait for the client that will resume their request.",
        lambda view: view.processor.registry.unclaimed.count,
    ),
    Family("tokenbus_queued_steps", "Steps that wait for the iterator over steps.", lambda view: view.step_queue[0]),
    Family("tokenbus_peak_queued_steps", "The most steps that waited for it.", lambda view: view.step_queue[1]),
    Family(
        "tokenbus_fill_ratio{of}",
        "How full each bounded thing is, from 0 to 1; of several of a kind, the fullest.",
        lambda view: {name: used / most for name, used, _, most in view.bounded()},
    ),
    Family(
        "tokenbus_peak_fill_ratio{of}",
        "The peak of each, where it is remembered.",
        lambda view: {name: peak / most for name, _, peak, most in view.bounded() if peak is not None},
    ),
    *_of_speculation(
        (
            "tokenbus_speculative_draft_tokens_total{worker}",
            "Draft tokens that the target model verified.",
            lambda of: of.drafted,
        ),
        (
            "tokenbus_speculative_accepted_tokens_total{worker}",
            "Draft tokens that the target model accepted.",
            lambda of: of.accepted,
        ),
        (
            "tokenbus_speculative_emitted_tokens_total{worker}",
            "Tokens that rows with verified drafts emitted, the target model's own included.",
            lambda of: of.emitted,
        ),
        ("tokenbus_speculative_rows_total{worker}", "Rows that verified drafts.", lambda of: of.rows),
        (
            "tokenbus_speculative_acceptance_ratio{worker}",
            "Accepted by draft tokens, since the start; absent where nothing was drafted.",
            lambda of: ratio(of.accepted, of.drafted),
        ),
        (
            "tokenbus_speculative_efficiency_ratio{worker}",
            "Emitted tokens by the most that could have been emitted, likewise.",
            lambda of: ratio(of.emitted, of.most),
        ),
    ),
    *_of_heads(
        (
            "tokenbus_speculative_head_draft_tokens_total{worker, head}",
            "Verified draft tokens by the head that proposed them: 1 is the token after the last known one.",
            lambda drafted, _: drafted,
        ),
        (
            "tokenbus_speculative_head_accepted_tokens_total{worker, head}",
            "Accepted draft tokens by head.",
            lambda _, accepted: accepted,
        ),
        (
            "tokenbus_speculative_head_acceptance_ratio{worker, head}",
            "Accepted by verified tokens of each head, since the start.",
            lambda drafted, accepted: accepted / drafted,
        ),
    ),
    *_of_log(
        (
            "tokenbus_log_items_total{outcome}",
            "Items: written; already there, after a restart; refused, as too large; left out, for want of buffer.",
            lambda of: {
                "written": of.writer.counts.items,
                "already_there": of.writer.counts.already_there,
                "refused": of.writer.counts.refused_items,
                "left_out": of.left_out,
            },
        ),
        (
            "tokenbus_log_missing_items_total",
            "Items that the log names as missing.",
            lambda of: of.writer.counts.missing_items,
        ),
        ("tokenbus_log_bytes_total", "Payload bytes of written items.", lambda of: of.writer.counts.payload_bytes),
        ("tokenbus_log_messages_total", "Messages that the server acknowledged.", lambda of: of.writer.counts.messages),
        (
            "tokenbus_log_write_seconds_total",
            "How long those messages took to be acknowledged, in all.",
            lambda of: of.writer.counts.write_seconds,
        ),
        (
            "tokenbus_log_failed_messages_total",
            "Messages that were not acknowledged, and are written again.",
            lambda of: of.writer.counts.failed_writes,
        ),
        ("tokenbus_log_waiting_items", "Items that are not in the log yet.", lambda of: of.writer.unwritten_items),
        ("tokenbus_log_waiting_bytes", "Bytes of those items.", lambda of: of.writer.buffered_bytes),
        ("tokenbus_log_lag_seconds", "How long the oldest of them has waited.", lambda of: of.writer.lag_seconds),
        (
            "tokenbus_log_connected_servers",
            "1 while there is a connection to a server that has the log, else 0.",
            lambda of: of.writer.is_connected,
        ),
        (
            "tokenbus_log_writable_servers",
            "1 while a server writes what comes to the log, else 0.",
            lambda of: not of.writer.problem,
        ),
        ("tokenbus_log_missing_replicas", "Replicas that are away.", lambda of: of.writer.missing_replicas),
        (
            "tokenbus_log_storage_ratio{server}",
            "Used share of JetStream's storage at each server of durable_log.monitors.",
            lambda of: of.monitors.storage_ratios,
        ),
    ),
)


def processor_collector(processor: Processor, times: StepTimes, watch: LoopWatch) -> FamilyCollector[ProcessorView]:
    """Return the collector of a processor, the times of its steps, and the watch of its loop."""
    return FamilyCollector("processor", PROCESSOR, lambda: ProcessorView(processor, times, watch))


def processor_health(processor: Processor, watch: LoopWatch) -> Health:
    """Return the health of a processor: whether it takes workers and clients."""
    problems = stalled(watch, processor.settings.metrics.stall_timeout_ms)
    log = processor.item_log
    outside = (log.problem,) if log is not None and log.problem else ()
    is_ready = not processor.waits_for_log and (log is None or log.is_ready)
    if not processor.is_listening and not processor.waits_for_log:
        problems.append("it does not listen for workers and clients")
    problems += [f"{address}: nothing new can connect" for address in processor.unreachable]
    facts = {
        "service": "processor",
        "id": processor.id,
        "is_draining": processor.worker_connections.is_draining,
        "workers": len(processor.workers.by_id),
        "clients": len(processor.clients.sessions),
        "open_requests": len(processor.registry.table),
    }
    return Health(tuple(problems), facts, outside, is_ready)


@contextlib.asynccontextmanager
async def serve_processor(processor: Processor) -> AsyncIterator[MetricsServer]:
    """Serve a processor's metrics at `metrics.address`, or nowhere if that is empty.

    To be called on the processor's event loop, before it listens or after. Raises an AddressError if the address
    cannot be used.
    """
    loop = asyncio.get_running_loop()
    times = StepTimes(processor.clock.now)
    watch = LoopWatch(lambda: loop, time.monotonic)
    server = MetricsServer(
        "metrics.address",
        processor.settings.metrics.address,
        processor_collector(processor, times, watch),
        lambda: processor_health(processor, watch),
        watch,
    )
    observers = processor.intake.step_observers
    async with server.running():
        if server.address:
            observers.append(times.observe)
        try:
            yield server
        finally:
            if server.address:
                observers.remove(times.observe)
