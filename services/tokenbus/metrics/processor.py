"""The metrics and health of a processor."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tokenbus.bus import Usage
from tokenbus.delivery import Step
from tokenbus.metrics.families import Family, FamilyCollector, Histogram, Samples, event_loop_lag, fill_ratio
from tokenbus.metrics.server import Health, LoopWatch, MetricsServer, stalled
from tokenbus.processor import Processor
from tokenbus.processor.requests import State
from tokenbus.processor.session import Session
from tokenbus.processor.stream import StreamCounts
from tokenbus.processor.workers import Worker
from tokenbus_contracts.generated.stream_pb2 import WorkerRole

if TYPE_CHECKING:
    from tokenbus.recordings.durable_log.item_log import ItemLog

_NS = 1_000_000_000
_STATES = {state.name.lower(): state for state in State if state is not State.CLOSED}


class StepTimes:
    """Measures the latencies of steps at delivery, which takes about 2 us per step."""

    def __init__(self, now: Callable[[], float], wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._now = now
        self._wall_ns = wall_ns
        self.assembly = Histogram()
        self.delivery = Histogram()

    def observe(self, step: Step) -> None:
        self.assembly.observe(self._now() - step.first_arrival)
        if produced := step.rows.header.produced_at_ns:
            # If the worker's clock is ahead of this clock, count a latency of 0.
            self.delivery.observe(max(0, self._wall_ns() - produced) / _NS)


class ProcessorView:
    """The counters of a processor during one scrape, on the thread of the scrape.

    Collections are copied atomically and without a lock, so two values may be from different moments.
    """

    def __init__(self, processor: Processor, times: StepTimes, watch: LoopWatch) -> None:
        self.processor = processor
        self.times = times
        self.watch = watch
        self.now = time.time()
        self.workers: list[Worker] = list(processor.workers.by_id.values())
        self.sessions: list[Session] = list(processor.clients.sessions.values())

    def lags(self) -> dict[str, float]:
        """Return the age of each worker's last step in seconds."""
        made = {worker.stream.worker_id: worker.stream.produced_at_ns for worker in self.workers}
        return {name: max(0.0, self.now - at / _NS) for name, at in made.items() if at}

    @cached_property
    def counts(self) -> dict[str, StreamCounts]:
        """The counts of all workers, including recently departed ones."""
        here = {worker.stream.worker_id: worker.stream.counts for worker in self.workers}
        return {**self.processor.workers.departed.copy(), **here}

    @cached_property
    def usage(self) -> Usage:
        return self.processor.usage()

    def bounded(self) -> Iterator[tuple[str, int, int]]:
        """Yield the name, the fill level and the limit of each bounded buffer or table."""
        settings, clients = self.processor.settings.processor, self.processor.settings.clients
        acks = [worker.stream.acks for worker in self.workers]
        queues = [session.send_queue for session in self.sessions]
        yield "requests", len(self.processor.registry.table), settings.max_requests
        yield "workers", len(self.workers), settings.max_workers
        yield "clients", len(self.sessions), clients.max_clients
        yield "open_steps", _most(worker.assembler.open_steps for worker in self.workers), settings.max_open_steps
        yield "pending_items", _most(map(len, acks)), settings.pending_items
        yield "pending_bytes", _most(each.bytes for each in acks), settings.pending_bytes
        yield "send_queue_frames", _most(map(len, queues)), clients.send_queue_frames
        yield "send_queue_bytes", _most(queue.bytes for queue in queues), clients.send_queue_bytes
        steps = self.processor.intake.step_queue
        yield "step_queue", 0 if steps is None else steps.qsize(), settings.step_queue
        yield "unread_bytes", self.usage.pending_bytes, self.processor.settings.bus.max_total_pending_bytes
        if (log := self.processor.item_log) is not None:
            yield "log_buffer", log.writer.buffered_bytes, self.processor.settings.durable_log.buffer_bytes


def _most(values: Iterable[int]) -> int:
    return max(values, default=0)


# Each function below returns a metric family that reads one kind of object.


def _of_counts(title: str, meaning: str, advice: str, read: Callable[[StreamCounts], float]) -> Family[ProcessorView]:
    return Family(title, meaning, advice, lambda view: {name: read(of) for name, of in view.counts.items()})


def _of_outcomes(
    title: str, meaning: str, advice: str, read: Callable[[StreamCounts], Samples]
) -> Family[ProcessorView]:
    """Return a family with the label `worker` and a second label."""

    def of_all(view: ProcessorView) -> Samples:
        return {(worker, label): value for worker, of in view.counts.items() for label, value in read(of).items()}

    return Family(title, meaning, advice, of_all)


def _of_log(
    title: str, meaning: str, advice: str, read: "Callable[[ItemLog], float | Samples]"
) -> Family[ProcessorView]:
    """Return a family that has values only with a durable log."""
    return Family(title, meaning, advice, lambda view: {} if (log := view.processor.item_log) is None else read(log))


def _by_state(view: ProcessorView) -> Samples:
    counted = np.bincount(view.processor.registry.table.state, minlength=max(_STATES.values()) + 1)
    return {name: int(counted[state]) for name, state in _STATES.items()}


def _requests(view: ProcessorView) -> Samples:
    counts = view.processor.registry.counts
    return {
        ("opened", ""): counts.opened,
        ("finished", ""): counts.finished,
        ("unclaimed", ""): counts.unclaimed,
        **{("failed", code): count for code, count in counts.failed.copy().items()},
        **{("refused", code): count for code, count in view.processor.dispatch.refused.copy().items()},
    }


def _settled(view: ProcessorView) -> Samples:
    names = ("delivered", "repeated", "late", "unknown", "foreign")
    return {name: getattr(view.processor.intake.router.counts, name) for name in names}


def _by_presence(side: str, peers: Sequence[Worker | Session]) -> Samples:
    states = Counter(map(_presence, peers))
    return {(side, state): states[state] for state in ("connected", "stalled", "away")}


def _presence(peer: Worker | Session) -> str:
    if peer.peer is None:
        return "away"
    return "stalled" if isinstance(peer, Worker) and peer.is_stalled else "connected"


def _assigned(view: ProcessorView) -> Samples:
    found = {}
    for worker in view.workers:
        hello = worker.stream.hello
        role = WorkerRole.Name(hello.role).removeprefix("WORKER_ROLE_").lower()
        labels = worker.stream.worker_id, role, hello.model, str(worker.stream.epoch), _presence(worker)
        found[labels] = view.processor.registry.table.load_of(worker.source.stream)
    return found


def _paused(view: ProcessorView) -> Samples:
    hellos = [worker.stream.hello for worker in view.workers if worker.stream.hello.paused_since_unix_ms]
    return {(hello.worker_id, hello.paused_by): hello.paused_since_unix_ms / 1000 for hello in hellos}


def _refused_peers(view: ProcessorView) -> Samples:
    return {
        (side, reason): refused
        for side, peers in (("worker", view.processor.worker_connections), ("client", view.processor.clients))
        for reason, refused in peers.refusals.copy().items()
    }


PROCESSOR: tuple[Family[ProcessorView], ...] = (
    fill_ratio(lambda view: {name: min(1.0, used / most) for name, used, most in view.bounded()}),
    event_loop_lag(lambda view: view.watch.lag),
    _of_outcomes(
        "tokenbus_stream_items_total{worker, outcome}",
        "Received items and repeated parts of steps, by outcome.",
        "If `lost` moves without `refused`, raise worker.retention_bytes. If `divergent` moves, ranks disagree or "
        "something rewrites messages. If `damaged` moves, hardware or a middlebox changes bytes. If `refused` moves, "
        "`item refused` in the log says why. If `duplicate` moves without replays, let only rank 0 publish.",
        lambda of: {
            "taken": of.taken,
            "duplicate": of.duplicates,
            "divergent": of.divergences,
            "damaged": of.damaged,
            "refused": of.refused,
            "lost": of.lost,
        },
    ),
    _of_outcomes(
        "tokenbus_stream_steps_total{worker, outcome}",
        "Delivered steps by outcome.",
        "If `incomplete` moves, requests ended with `gap`, so check the ranks that send parts. If `missing_draft` "
        "moves, drafts arrive more than 2 s late.",
        lambda of: {
            "complete": of.steps - of.incomplete_steps - of.missing_drafts,
            "incomplete": of.incomplete_steps,
            "missing_draft": of.missing_drafts,
        },
    ),
    _of_counts(
        "tokenbus_stream_bytes_total{worker}",
        "Received payload bytes, including repeated items.",
        "If high compared to the tokens, lower limits.max_top_k.",
        lambda of: of.bytes,
    ),
    _of_counts(
        "tokenbus_stream_tokens_total{worker}",
        "Tokens that a worker sent for requests.",
        "If low with busy clients, check lag and credit.",
        lambda of: of.tokens,
    ),
    _of_counts(
        "tokenbus_stream_gaps_total{worker}",
        "Gaps, which are runs of lost items.",
        "A gap ends requests with the error `gap`.",
        lambda of: of.gaps,
    ),
    _of_counts(
        "tokenbus_stream_replays_total{worker}",
        "Requests to the worker for missing items.",
        "If steadily rising, check the network to this worker.",
        lambda of: of.replays,
    ),
    Family(
        "tokenbus_stream_lag_seconds{worker}",
        "Age of the last delivered step.",
        "If high with open requests, the engine is stuck or clocks differ.",
        lambda view: view.lags(),
    ),
    Family(
        "tokenbus_stream_lag_items{worker}",
        "Sent items that are not yet received in order.",
        "If high for long, the network loses items or, without replays, the worker is absent.",
        lambda view: {of.stream.worker_id: of.stream.lag for of in view.workers},
    ),
    Family(
        "tokenbus_stream_credit_items{worker}",
        "Items that the worker may still send.",
        "If 0 for long, `tokenbus_fill_ratio` shows where items wait for consumers.",
        lambda view: {of.stream.worker_id: of.stream.credit_left for of in view.workers},
    ),
    _of_counts(
        "tokenbus_speculative_rows_total{worker}",
        "Rows in which drafts were verified.",
        "No action is needed.",
        lambda of: of.speculation.rows,
    ),
    _of_outcomes(
        "tokenbus_speculative_draft_tokens_total{worker, head}",
        "Verified draft tokens by head; head 1 drafts the next token.",
        "If few are accepted, draft fewer tokens.",
        lambda of: {str(head): drafted for head, drafted, _ in of.speculation.heads()},
    ),
    _of_outcomes(
        "tokenbus_speculative_accepted_tokens_total{worker, head}",
        "Accepted draft tokens by head.",
        "If low, the draft model does not match the model. If low for late heads, draft fewer tokens.",
        lambda of: {str(head): accepted for head, _, accepted in of.speculation.heads()},
    ),
    Family(
        "tokenbus_open_requests{state}",
        "Open requests by state.",
        "If `ended` or `resumed` rises, clients leave or processors restart.",
        _by_state,
    ),
    Family(
        "tokenbus_undispatched_requests",
        "Requests that wait for a worker to connect.",
        "If high, workers are absent, and requests will end with `no_worker`.",
        lambda view: view.processor.dispatch.waiting,
    ),
    Family(
        "tokenbus_requests_total{outcome, code}",
        "Requests by outcome.",
        "For `failed`, operations.md explains each code. For `refused` with `overloaded` or `no_worker`, add workers. "
        "If `finished` falls behind `opened`, requests pile up. If `unclaimed` moves, clients die or cannot reach this "
        "processor.",
        _requests,
    ),
    Family(
        "tokenbus_settled_rows_total{outcome}",
        "Rows by outcome.",
        "If `late` or `unknown` moves, workers continue ended requests. If `foreign` moves, two workers have the same "
        "request.",
        _settled,
    ),
    Family(
        "tokenbus_buffered_rows",
        "Rows that wait for a client to resume their request.",
        "If high, clients do not resume requests.",
        lambda view: view.processor.registry.table.buffered_rows,
    ),
    Family(
        "tokenbus_refused_messages_total{rule}",
        "Invalid messages, by the rule that they break.",
        "`item refused` and `frame refused` in the log name the sender, field and value.",
        lambda view: view.processor.refused_messages.by_rule,
    ),
    Family(
        "tokenbus_refusals_total{side}",
        "Refused workers, steps and clients, and connections that the transport refused.",
        "The log names the peer and the reason.",
        lambda view: {
            "worker": view.processor.worker_connections.refused + view.processor.intake.refused_items,
            "step": view.processor.intake.refused_parts,
            "client": view.processor.clients.refused,
            "transport": view.processor.refused_connections,
        },
    ),
    Family(
        "tokenbus_step_assembly_seconds",
        "Time from the first part of a step to its delivery.",
        "If high, other parts or drafts arrive late.",
        lambda view: view.times.assembly,
        is_histogram=True,
    ),
    Family(
        "tokenbus_delivery_latency_seconds",
        "Time from the production of a step to its delivery to requests.",
        "If high, check credit, the network, this event loop and the clocks.",
        lambda view: view.times.delivery,
        is_histogram=True,
    ),
    Family(
        "tokenbus_peers{side, state}",
        "Workers and clients by state: connected, stalled (no progress), or away (may reconnect).",
        "If a worker is stalled, the engine hangs or computes a long step. If no worker is connected, look for "
        "`refused by processor` in its log. If a peer stays away, the peer crashed or lost the network.",
        lambda view: {**_by_presence("worker", view.workers), **_by_presence("client", view.sessions)},
    ),
    Family(
        "tokenbus_worker_assigned_requests{worker, role, model, epoch, state}",
        "Open requests of each worker.",
        "If uneven, a worker is slow or has a lower worker.max_requests.",
        _assigned,
    ),
    Family(
        "tokenbus_worker_paused_since_seconds{worker, client}",
        "Unix time at which a client paused the engine.",
        "If this client died, send `POST /resume`. A pause with `lease_s` ends by itself.",
        _paused,
    ),
    Family(
        "tokenbus_gone_workers_total",
        "Workers that left or were lost.",
        "`worker gone` in the log has the reason.",
        lambda view: view.processor.workers.lost,
    ),
    Family(
        "tokenbus_refused_peers_total{side, reason}",
        "Refused workers and clients, by reason.",
        "A key lacks the role or the name, or a connected peer has the same id. The log names the peer.",
        _refused_peers,
    ),
    Family(
        "tokenbus_refused_resumes_total",
        "Attempts to resume another client's request.",
        "Two programs use one request id, or a client attacks. `resume refused` in the log names the client.",
        lambda view: view.processor.registry.counts.refused_resumes,
    ),
    Family(
        "tokenbus_evicted_clients_total",
        "Clients that lost their requests because too much data waited for them.",
        "The client reads too slowly or acknowledges nothing. `slow client` in the log names the client.",
        lambda view: view.processor.clients.evicted,
    ),
    Family(
        "tokenbus_watch_skipped_items_total",
        "Items skipped for a watching client that reads too slowly.",
        "Watch fewer workers. Requests are not affected.",
        lambda view: view.processor.clients.watchers.skipped_items,
    ),
    Family(
        "tokenbus_commands_total{command, outcome}",
        "Operator commands by outcome: done, refused, or lost with the worker.",
        "`command refused` in the worker's log has the reason.",
        lambda view: view.processor.clients.commands.answers,
    ),
    Family(
        "tokenbus_open_commands",
        "Operator commands without an answer.",
        "If high for long, an engine drains or loads weights.",
        lambda view: len(view.processor.clients.commands),
    ),
    Family(
        "tokenbus_failed_ticks_total",
        "Failed periodic checks of a peer or request, which are defects.",
        "Report the defect with the traceback of `tick failed`.",
        lambda view: view.processor.failed_ticks,
    ),
    Family(
        "tokenbus_unreachable_addresses",
        "Addresses that accept no new connections.",
        "Above 0, a socket's file was removed. Restart the processor.",
        lambda view: len(view.processor.unreachable),
    ),
    Family(
        "tokenbus_bus_connections{state}",
        "Connections by state: `admitted` after the hello, `unadmitted` before.",
        "If `unadmitted` is near 4096, something connects without a hello.",
        lambda view: {"admitted": view.usage.admitted, "unadmitted": view.usage.unadmitted},
    ),
    Family(
        "tokenbus_cut_connections_total{bound}",
        "Connections that were closed because they exceeded a limit.",
        "The bounds: `bytes` (endless messages), `silent` (no introduction), `id` and `key` (foreign peer), "
        "`connections` and `accept` (too many connections). `connection refused` in the log names the address.",
        lambda view: view.usage.cut_off,
    ),
    _of_log(
        "tokenbus_log_items_total{outcome}",
        "Items for the log by outcome.",
        "If `missing` moves, the log has gaps, because a buffer was full or a processor was killed. If `refused` "
        "moves, raise the servers' max_payload. If `left_out` moves, the log is too slow.",
        lambda of: {
            "written": of.writer.counts.items,
            "already_there": of.writer.counts.already_there,
            "refused": of.writer.counts.refused_items,
            "left_out": of.left_out,
            "missing": of.writer.counts.missing_items,
        },
    ),
    _of_log(
        "tokenbus_log_failed_messages_total",
        "Failed writes, which are retried.",
        "The message `not written to the log yet` has the reason.",
        lambda of: of.writer.counts.failed_writes,
    ),
    _of_log(
        "tokenbus_log_waiting_items",
        "Items that are not yet in the log.",
        "If high, the servers are slow or absent.",
        lambda of: of.writer.unwritten_items,
    ),
    _of_log(
        "tokenbus_log_lag_seconds",
        "Age of the oldest item that is not yet in the log.",
        "If high while `tokenbus_log_writable_servers` is 1, check the servers' disks.",
        lambda of: of.writer.lag_seconds,
    ),
    _of_log(
        "tokenbus_log_writable_servers",
        "1 while a server accepts writes to the log, else 0.",
        "If 0 for long, /healthz has the reason, and operations.md has the remedy.",
        lambda of: not of.writer.problem,
    ),
    _of_log(
        "tokenbus_log_missing_replicas",
        "Missing replicas of the log.",
        "If above 0 for long, start the missing servers. Without a quorum, nothing is written.",
        lambda of: of.writer.missing_replicas,
    ),
    _of_log(
        "tokenbus_log_storage_ratio{server}",
        "Used share of JetStream's storage at each server of durable_log.monitors.",
        "Near 1, delete streams, add storage, or lower durable_log.max_bytes.",
        lambda of: of.monitors.storage_ratios,
    ),
)


def processor_collector(processor: Processor, times: StepTimes, watch: LoopWatch) -> FamilyCollector[ProcessorView]:
    return FamilyCollector("processor", PROCESSOR, lambda: ProcessorView(processor, times, watch))


def processor_health(processor: Processor, watch: LoopWatch) -> Health:
    problems = stalled(watch, processor.settings.bus.stall_timeout_ms)
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
    """Serve the metrics of a processor at `processor.metrics_address`, if set.

    The caller must be on the processor's event loop. Raises AddressError if the address cannot be used.
    """
    loop = asyncio.get_running_loop()
    times = StepTimes(processor.clock.now)
    watch = LoopWatch(lambda: loop, time.monotonic)
    server = MetricsServer(
        "processor.metrics_address",
        processor.settings.processor.metrics_address,
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
