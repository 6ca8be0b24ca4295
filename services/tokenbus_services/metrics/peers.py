"""The processor's metrics of its peers, of what waits for them, and of draft models."""

from collections.abc import Callable, Sequence

from tokenbus_contracts.generated.stream_pb2 import WorkerRole
from tokenbus_services.metrics.families import Family, Samples, counter, each, gauge
from tokenbus_services.metrics.view import ProcessorView
from tokenbus_services.processor.intake import Worker
from tokenbus_services.processor.session import Session
from tokenbus_services.processor.speculation import Speculation, ratio


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
    for side, peers in (("worker", view.processor.workers), ("client", view.processor.clients)):
        for reason, refused in peers.refusals.copy().items():
            yield (side, reason), refused


def _connections(view: ProcessorView) -> Samples:
    usage = view.processor.usage()
    yield ("admitted",), usage.admitted
    yield ("unadmitted",), usage.unadmitted


PEERS: tuple[Family[ProcessorView], ...] = (
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
        "Connections that were cut off for a bound of the transport: bytes, connections, unadmitted, silent, id, and "
        "accept where no descriptor was left.",
        lambda view: each(view.processor.usage().cut_off),
        "bound",
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
        lambda view: view.processor.clients.resumes.refused,
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
)


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


SPECULATION: tuple[Family[ProcessorView], ...] = (
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
)
