"""The processor's metrics, of workers' streams, requests, times, peers and draft models, and its health."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from tokenbus_contracts.generated.stream_pb2 import WorkerRole
from tokenbus_services.metrics.durable_log import DURABLE_LOG
from tokenbus_services.metrics.families import (
    Family,
    FamilyCollector,
    Samples,
    attributes,
    counter,
    each,
    gauge,
    histogram,
)
from tokenbus_services.metrics.health import Health, LoopWatch, stalled
from tokenbus_services.metrics.server import MetricsServer
from tokenbus_services.metrics.view import ProcessorView, StepTimes
from tokenbus_services.processor import Processor
from tokenbus_services.processor.requests import State
from tokenbus_services.processor.session import Session
from tokenbus_services.processor.speculation import Speculation, ratio
from tokenbus_services.processor.stream import StreamCounts
from tokenbus_services.processor.workers import Worker

_SETTLED = ("delivered", "repeated", "late", "unknown", "early", "foreign")
_STATES = {state.name.lower(): state for state in State if state is not State.CLOSED}


def _counter(name: str, meaning: str, read: Callable[[StreamCounts], float]) -> Family[ProcessorView]:
    return counter(name, meaning, lambda view: view.each_count(read), "worker")


def _gauge(name: str, meaning: str, read: Callable[[Worker], float]) -> Family[ProcessorView]:
    return gauge(name, meaning, lambda view: view.each_worker(read), "worker")


def _by_state(view: ProcessorView) -> Samples:
    counted = np.bincount(view.processor.registry.table.state, minlength=max(_STATES.values()) + 1)
    return (((name,), int(counted[state])) for name, state in _STATES.items())


def _refused_by_side(view: ProcessorView) -> Samples:
    processor = view.processor
    yield ("worker",), processor.worker_connections.refused
    yield ("step",), processor.intake.refused
    yield ("client",), processor.clients.refused
    yield ("transport",), processor.refused_connections


def _by_presence(peers: Sequence[Worker | Session]) -> Samples:
    connected = sum(peer.peer is not None for peer in peers)
    yield ("connected",), connected
    yield ("away",), len(peers) - connected


def _assigned(view: ProcessorView) -> Samples:
    for worker in view.workers:
        hello = worker.stream.hello
        role = WorkerRole.Name(hello.role).removeprefix("WORKER_ROLE_").lower()
        state = "away" if worker.peer is None else "connected"
        load = view.processor.registry.table.load_of(worker.source.stream)
        yield (worker.stream.worker_id, role, hello.model, str(worker.stream.epoch), state), load


def _refused(view: ProcessorView) -> Samples:
    for side, peers in (("worker", view.processor.worker_connections), ("client", view.processor.clients)):
        for reason, refused in peers.refusals.copy().items():
            yield (side, reason), refused


def _connections(view: ProcessorView) -> Samples:
    usage = view.processor.usage()
    yield ("admitted",), usage.admitted
    yield ("unadmitted",), usage.unadmitted


def _speculation(read: Callable[[Speculation], float | None]) -> Callable[[ProcessorView], Samples]:
    def samples(view: ProcessorView) -> Samples:
        for worker, counts in view.counts:
            value = read(counts.speculation)
            if value is not None:
                yield (worker,), value

    return samples


def _heads(read: Callable[[tuple[int, int, int]], float]) -> Callable[[ProcessorView], Samples]:
    def samples(view: ProcessorView) -> Samples:
        for worker, counts in view.counts:
            yield from (((worker, str(head[0])), read(head)) for head in counts.speculation.heads())

    return samples


PROCESSOR: tuple[Family[ProcessorView], ...] = (
    _counter(
        "tokenbus_stream_items_total",
        "Items that came from a worker, repeated ones too.",
        lambda counts: counts.items,
    ),
    _counter(
        "tokenbus_stream_bytes_total",
        "Payload bytes that came from a worker, repeated ones too.",
        lambda counts: counts.bytes,
    ),
    _counter("tokenbus_stream_steps_total", "Steps of a worker that were handed out.", lambda counts: counts.steps),
    _counter(
        "tokenbus_stream_rows_total",
        "Rows of a worker that were new to their requests.",
        lambda counts: counts.rows,
    ),
    _counter(
        "tokenbus_stream_tokens_total",
        "Tokens of a worker that were handed to requests.",
        lambda counts: counts.tokens,
    ),
    gauge(
        "tokenbus_stream_lag_seconds",
        "How long ago the last step that was handed out was made, by the worker's clock.",
        lambda view: view.lags(),
        "worker",
    ),
    _gauge(
        "tokenbus_stream_lag_items",
        "Items that a worker has sent and that are not in order here yet.",
        lambda worker: worker.stream.lag,
    ),
    _gauge(
        "tokenbus_stream_credit_items",
        "Items that a worker may still send.",
        lambda worker: worker.stream.credit_left[0],
    ),
    _gauge(
        "tokenbus_stream_credit_bytes",
        "Payload bytes that a worker may still send.",
        lambda worker: worker.stream.credit_left[1],
    ),
    _gauge(
        "tokenbus_stream_pending_items",
        "Items of a worker that wait for consumers, so that the worker must keep them.",
        lambda worker: len(worker.stream.acks),
    ),
    _gauge(
        "tokenbus_stream_pending_bytes",
        "Payload bytes of a worker that wait for consumers.",
        lambda worker: worker.stream.acks.bytes,
    ),
    _gauge(
        "tokenbus_stream_peak_pending_items",
        "The most items of a worker that waited for consumers at once, since it came.",
        lambda worker: worker.stream.acks.peak,
    ),
    _gauge(
        "tokenbus_stream_open_steps",
        "Steps of a worker that wait for their other parts or their draft.",
        lambda worker: worker.assembler.open_steps,
    ),
    _counter("tokenbus_stream_gaps_total", "Runs of items that could not be had.", lambda counts: counts.gaps),
    _counter("tokenbus_stream_lost_items_total", "Items that could not be had.", lambda counts: counts.lost),
    _counter(
        "tokenbus_stream_replays_total",
        "How often missing items were asked for again.",
        lambda counts: counts.replays,
    ),
    _counter(
        "tokenbus_stream_duplicate_items_total",
        "Items that had come before, and were dropped.",
        lambda counts: counts.duplicates,
    ),
    _counter(
        "tokenbus_stream_duplicate_parts_total",
        "Parts of steps that had come in another item, and were dropped.",
        lambda counts: counts.repeated_parts,
    ),
    _counter(
        "tokenbus_stream_divergent_items_total",
        "Items and parts that had come before with other contents; the first is what counts.",
        lambda counts: counts.divergences + counts.divergent_parts,
    ),
    _counter(
        "tokenbus_stream_damaged_items_total",
        "Items whose bytes are not those that were sent, by their checksum; they are asked for again.",
        lambda counts: counts.damaged,
    ),
    _counter("tokenbus_stream_refused_items_total", "Items that break the contract.", lambda counts: counts.refused),
    _counter(
        "tokenbus_stream_incomplete_steps_total",
        "Steps that were given up before all of their rows came.",
        lambda counts: counts.incomplete_steps,
    ),
    counter(
        "tokenbus_stream_missing_drafts_total",
        "Steps whose draft was announced and was not there in time, or did not match.",
        lambda view: view.missing_drafts(),
        "worker",
    ),
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
        lambda view: attributes(view.processor.registry.router.counts, *_SETTLED),
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
        lambda view: attributes(view.processor.dead_letters, "kept", "dropped"),
        "outcome",
    ),
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
    gauge(
        "tokenbus_unreachable_addresses",
        "Of the processor's two addresses those whose socket file was removed or replaced.",
        lambda view: len(view.processor.unreachable),
    ),
    gauge(
        "tokenbus_bus_connections",
        "Connections to the processor, by whether their peer has introduced itself.",
        _connections,
        "state",
    ),
    counter(
        "tokenbus_cut_connections_total",
        "Connections that were cut off for a bound of the transport: bytes, connections, silent, id, and "
        "accept where no descriptor was left.",
        lambda view: each(view.processor.usage().cut_off),
        "bound",
    ),
    counter(
        "tokenbus_dropped_frames_total",
        "Over NATS: hellos and frames that the processor dropped, by the name of the peers that sent them, the 64 with "
        "the most; what the NATS server drops for it is not counted.",
        lambda view: each(view.processor.usage().dropped),
        "peer",
    ),
    gauge(
        "tokenbus_pending_bytes",
        "What came in over tcp and was not read as whole messages.",
        lambda view: view.processor.usage().pending_bytes,
    ),
    gauge(
        "tokenbus_peak_pending_bytes",
        "The most of it at once, since the start.",
        lambda view: view.processor.usage().peak_pending_bytes,
    ),
    gauge(
        "tokenbus_known_workers",
        "Workers that are connected, and those that are away and not given up yet.",
        lambda view: _by_presence(view.workers),
        "state",
    ),
    gauge(
        "tokenbus_worker_assigned_requests",
        "Open requests that each worker has or is to go on with, and its role, model and epoch, and whether it is "
        "connected or away.",
        _assigned,
        "worker",
        "role",
        "model",
        "epoch",
        "state",
    ),
    counter(
        "tokenbus_gone_workers_total",
        "Workers that left or were given up; their requests ended.",
        lambda view: view.processor.workers.lost,
    ),
    gauge(
        "tokenbus_known_clients",
        "Clients that are connected, and those that are away and may come back.",
        lambda view: _by_presence(view.sessions),
        "state",
    ),
    counter(
        "tokenbus_refused_peers_total",
        "Workers and clients that were refused, by why: a key without the right, a name or a session that another has.",
        _refused,
        "side",
        "reason",
    ),
    counter(
        "tokenbus_refused_resumes_total",
        "Resumed requests that are another client's.",
        lambda view: view.processor.registry.counts.refused_resumes,
    ),
    counter(
        "tokenbus_evicted_clients_total",
        "How often a client lost its requests because too much waited for it.",
        lambda view: view.processor.clients.evicted,
    ),
    counter(
        "tokenbus_failed_ticks_total",
        "How often looking at one worker, client or request failed, a defect; the rest was looked at all the same.",
        lambda view: view.processor.failed_ticks,
    ),
    gauge(
        "tokenbus_watching_clients",
        "Clients that are shown whole streams.",
        lambda view: len(view.processor.clients.watchers),
    ),
    counter(
        "tokenbus_watch_skipped_items_total",
        "Items that were not shown to a client that watches, because it reads too slowly; requests are not affected.",
        lambda view: view.processor.clients.watchers.skipped_items,
    ),
    gauge(
        "tokenbus_send_queue_frames",
        "Frames that wait for all clients together, or that they have not acknowledged.",
        lambda view: sum(len(session.send_queue) for session in view.sessions),
    ),
    gauge(
        "tokenbus_send_queue_bytes",
        "Bytes of those frames.",
        lambda view: sum(session.send_queue.bytes for session in view.sessions),
    ),
    gauge(
        "tokenbus_peak_send_queue_frames",
        "The most frames that waited for one of the clients that are here.",
        lambda view: max((session.send_queue.peak for session in view.sessions), default=0),
    ),
    gauge(
        "tokenbus_buffered_rows",
        "Rows that wait in this process for an iterator over their request, or for the client that will resume it.",
        lambda view: sum(view.buffered),
    ),
    gauge(
        "tokenbus_fullest_buffer_rows",
        "Rows that wait for the request that has the most of them.",
        lambda view: max(view.buffered, default=0),
    ),
    gauge("tokenbus_queued_steps", "Steps that wait for the iterator over steps.", lambda view: view.feed[0]),
    gauge("tokenbus_peak_queued_steps", "The most steps that waited for it.", lambda view: view.feed[1]),
    gauge(
        "tokenbus_fill_ratio",
        "How full each bounded thing is, from 0 to 1; of several of a kind, the fullest.",
        lambda view: view.fill(),
        "of",
    ),
    gauge(
        "tokenbus_peak_fill_ratio",
        "How full each of those was at most, where that is remembered.",
        lambda view: view.peaks(),
        "of",
    ),
    counter(
        "tokenbus_speculative_draft_tokens_total",
        "Draft tokens that the target model verified.",
        _speculation(lambda speculation: speculation.drafted),
        "worker",
    ),
    counter(
        "tokenbus_speculative_accepted_tokens_total",
        "Draft tokens that the target model accepted.",
        _speculation(lambda speculation: speculation.accepted),
        "worker",
    ),
    counter(
        "tokenbus_speculative_emitted_tokens_total",
        "Tokens that rows with verified drafts emitted, the target model's own included.",
        _speculation(lambda speculation: speculation.emitted),
        "worker",
    ),
    counter(
        "tokenbus_speculative_rows_total",
        "Rows that verified drafts; with the draft tokens, the most tokens that could have been emitted.",
        _speculation(lambda speculation: speculation.rows),
        "worker",
    ),
    gauge(
        "tokenbus_speculative_acceptance_ratio",
        "Accepted by draft tokens, since the start; absent where nothing was drafted.",
        _speculation(lambda speculation: ratio(speculation.accepted, speculation.drafted)),
        "worker",
    ),
    gauge(
        "tokenbus_speculative_efficiency_ratio",
        "Emitted tokens by the most that could have been emitted, since the start; absent where nothing was drafted.",
        _speculation(lambda speculation: ratio(speculation.emitted, speculation.most)),
        "worker",
    ),
    counter(
        "tokenbus_speculative_head_draft_tokens_total",
        "Draft tokens that were verified, by the head that proposed them: 1 is the token after the last known one.",
        _heads(lambda head: head[1]),
        "worker",
        "head",
    ),
    counter(
        "tokenbus_speculative_head_accepted_tokens_total",
        "Draft tokens that were accepted, by head.",
        _heads(lambda head: head[2]),
        "worker",
        "head",
    ),
    gauge(
        "tokenbus_speculative_head_acceptance_ratio",
        "Accepted by verified tokens of each head, since the start.",
        _heads(lambda head: head[2] / head[1]),
        "worker",
        "head",
    ),
    *DURABLE_LOG,
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
