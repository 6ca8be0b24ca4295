"""The processor's metrics of its peers, of what waits for them, and of draft models."""

from collections.abc import Callable

from tokenbus_contracts.generated.stream_pb2 import WorkerRole
from tokenbus_services.metrics.families import Family, Kind, Samples, one
from tokenbus_services.metrics.view import ProcessorView
from tokenbus_services.processor.speculation import Speculation, ratio


def _connected(view: ProcessorView) -> Samples:
    workers = sum(worker.peer is not None for worker in view.workers)
    yield ("connected",), workers
    yield ("away",), len(view.workers) - workers


def _clients(view: ProcessorView) -> Samples:
    clients = sum(session.peer is not None for session in view.sessions)
    yield ("connected",), clients
    yield ("away",), len(view.sessions) - clients


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


def _cut_off(view: ProcessorView) -> Samples:
    return (((bound,), count) for bound, count in view.processor.usage().cut_off.items())


PEERS: tuple[Family[ProcessorView], ...] = (
    Family(
        Kind.GAUGE,
        "tokenbus_unreachable_addresses",
        "Of the processor's two addresses those whose socket file was removed or replaced.",
        "Not 0: nothing new can connect there; start the processor again, and find out what removed the file.",
        lambda view: one(len(view.processor.unreachable)),
        (),
        "tokenbus_unreachable_addresses > 0",
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_bus_connections",
        "Connections to the processor, by whether their peer has introduced itself.",
        "unadmitted near bus.max_unadmitted_connections: something connects and says nothing.",
        _connections,
        ("state",),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_cut_connections_total",
        "Connections that were cut off for a bound of the transport: bytes, connections, unadmitted, silent, id, and "
        "accept where no descriptor was left.",
        "Moves: something floods the bus, or the bounds in bus.* are too small; the log says who, and which bound.",
        _cut_off,
        ("bound",),
        "increase(tokenbus_cut_connections_total[5m]) > 0",
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_pending_bytes",
        "What came in over tcp and was not read as whole messages.",
        "Near bus.max_total_pending_bytes: the event loop is late, or peers send messages that do not end.",
        lambda view: one(view.processor.usage().pending_bytes),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_peak_pending_bytes",
        "The most of it at once, since the start.",
        "As above.",
        lambda view: one(view.processor.usage().peak_pending_bytes),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_known_workers",
        "Workers that are connected, and those that are away and not given up yet.",
        "connected low: look at the workers that are not there; away for long: their network.",
        _connected,
        ("state",),
        'tokenbus_known_workers{state="connected"} == 0',
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_worker_assigned_requests",
        "Open requests that each worker has or is to go on with, and its role, model and epoch, and whether it is "
        "connected or away.",
        "Uneven: a worker is slow, or takes fewer by its worker.max_requests.",
        _assigned,
        ("worker", "role", "model", "epoch", "state"),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_gone_workers_total",
        "Workers that left or were given up; their requests ended.",
        "Moves without a deployment: workers crash, or are silent for bus.heartbeat_timeout_ms.",
        lambda view: one(view.processor.workers.lost),
        (),
        "increase(tokenbus_gone_workers_total[5m]) > 0",
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_known_clients",
        "Clients that are connected, and those that are away and may come back.",
        "away high: clients crash, or their network breaks.",
        _clients,
        ("state",),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_refused_peers_total",
        "Workers and clients that were refused, by why: a key without the right, a name or a session that another has.",
        "Moves: the log's `worker refused` and `client refused` name the peer; find out what it wants.",
        _refused,
        ("side", "reason"),
        "sum by (side, reason) (increase(tokenbus_refused_peers_total"
        '{reason=~"not_authorized|worker_id_taken|session_taken"}[5m])) > 0',
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_refused_resumes_total",
        "Resumed requests that are another client's.",
        "Moves: a client asks for what is not its own; the log's `resume refused` names it.",
        lambda view: one(view.processor.clients.resumes.refused),
        (),
        "increase(tokenbus_refused_resumes_total[5m]) > 0",
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_evicted_clients_total",
        "How often a client lost its requests because too much waited for it.",
        "Moves: the log's `slow client` names it; it reads too slowly, or acknowledges nothing.",
        lambda view: one(view.processor.clients.evicted),
        (),
        "increase(tokenbus_evicted_clients_total[5m]) > 0",
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_failed_ticks_total",
        "How often looking at one worker, client or request failed, a defect; the rest was looked at all the same.",
        "Moves: report it, with the traceback of the log's `tick failed`.",
        lambda view: one(view.processor.failed_ticks),
        (),
        "increase(tokenbus_failed_ticks_total[5m]) > 0",
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_watching_clients",
        "Clients that are shown whole streams.",
        "High: each of them costs a copy of every item.",
        lambda view: one(len(view.processor.clients.watchers)),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_watch_skipped_items_total",
        "Items that were not shown to a client that watches, because it reads too slowly; requests are not affected.",
        "Moves: the watching client sees holes; raise its client.window_frames.",
        lambda view: one(view.processor.clients.watchers.skipped_items),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_send_queue_frames",
        "Frames that wait for all clients together, or that they have not acknowledged.",
        "High: clients read slowly; at clients.send_queue_frames a client's requests end.",
        lambda view: one(sum(len(session.send_queue) for session in view.sessions)),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_send_queue_bytes",
        "Bytes of those frames.",
        "High: as send_queue_frames, and this process's memory.",
        lambda view: one(sum(session.send_queue.bytes for session in view.sessions)),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_peak_send_queue_frames",
        "The most frames that waited for one of the clients that are here.",
        "Near clients.send_queue_frames: that client's requests are about to end; the log's `slow client` names it.",
        lambda view: one(max((session.send_queue.peak for session in view.sessions), default=0)),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_buffered_rows",
        "Rows that wait in this process for an iterator over their request, or for the client that will resume it.",
        "High: iterators are slow, or requests are not claimed.",
        lambda view: one(sum(view.buffered)),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_fullest_buffer_rows",
        "Rows that wait for the request that has the most of them.",
        "At processor.request_buffer_rows: its worker waits, or the request ends.",
        lambda view: one(max(view.buffered, default=0)),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_queued_steps",
        "Steps that wait for the iterator over steps.",
        "At processor.step_queue: every worker waits for that iteration.",
        lambda view: one(view.feed[0]),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_peak_queued_steps",
        "The most steps that waited for it.",
        "Near processor.step_queue: as queued_steps.",
        lambda view: one(view.feed[1]),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_fill_ratio",
        "How full each bounded thing is, from 0 to 1; of several of a kind, the fullest.",
        "Near 1: what is named is about to refuse, to wait or to end something; docs/settings.md has its bound.",
        lambda view: view.fill(),
        ("of",),
        "tokenbus_fill_ratio > 0.8",
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_peak_fill_ratio",
        "How full each of those was at most, where that is remembered.",
        "Near 1: it was close; raise the bound or find the cause before it happens.",
        lambda view: view.peaks(),
        ("of",),
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
    Family(
        Kind.COUNTER,
        "tokenbus_speculative_draft_tokens_total",
        "Draft tokens that the target model verified.",
        "High for few accepted: the engine drafts for nothing; draft fewer.",
        _speculation(lambda speculation: speculation.drafted),
        ("worker",),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_speculative_accepted_tokens_total",
        "Draft tokens that the target model accepted.",
        "Low: the draft model does not suit what is asked for.",
        _speculation(lambda speculation: speculation.accepted),
        ("worker",),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_speculative_emitted_tokens_total",
        "Tokens that rows with verified drafts emitted, the target model's own included.",
        "Low: as accepted tokens.",
        _speculation(lambda speculation: speculation.emitted),
        ("worker",),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_speculative_rows_total",
        "Rows that verified drafts; with the draft tokens, the most tokens that could have been emitted.",
        "High: that is load.",
        _speculation(lambda speculation: speculation.rows),
        ("worker",),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_speculative_acceptance_ratio",
        "Accepted by draft tokens, since the start; absent where nothing was drafted.",
        "Falls: the traffic changed, or the draft model's weights are old.",
        _speculation(lambda speculation: ratio(speculation.accepted, speculation.drafted)),
        ("worker",),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_speculative_efficiency_ratio",
        "Emitted tokens by the most that could have been emitted, since the start; absent where nothing was drafted.",
        "Falls: as the acceptance ratio.",
        _speculation(lambda speculation: ratio(speculation.emitted, speculation.most)),
        ("worker",),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_speculative_head_draft_tokens_total",
        "Draft tokens that were verified, by the head that proposed them: 1 is the token after the last known one.",
        "High for few accepted: this head is not worth its time; draft fewer.",
        _heads(lambda head: head[1]),
        ("worker", "head"),
    ),
    Family(
        Kind.COUNTER,
        "tokenbus_speculative_head_accepted_tokens_total",
        "Draft tokens that were accepted, by head.",
        "Low for late heads: draft fewer.",
        _heads(lambda head: head[2]),
        ("worker", "head"),
    ),
    Family(
        Kind.GAUGE,
        "tokenbus_speculative_head_acceptance_ratio",
        "Accepted by verified tokens of each head, since the start.",
        "Low for late heads: draft fewer.",
        _heads(lambda head: head[2] / head[1]),
        ("worker", "head"),
    ),
)
