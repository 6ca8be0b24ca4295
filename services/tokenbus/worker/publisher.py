"""Publisher: one engine's stream to its processor, and the requests from the processor."""

import asyncio
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from tokenbus.bus import Transport, clock_for, transport_for
from tokenbus.bus.link import Link
from tokenbus.clock import Clock
from tokenbus.delivery.step import LEAVES
from tokenbus.logs import logger
from tokenbus.loop_thread import start_loop_thread
from tokenbus.settings import Settings, listed_addresses
from tokenbus.worker.engine import NO_DESCRIPTION, EngineDescription
from tokenbus.worker.engine_output import admitted_event, error_event
from tokenbus.worker.errors import NotRunningError, RetentionFullError, WouldWaitError
from tokenbus.worker.request_queue import RequestQueue
from tokenbus.worker.retention import Retention
from tokenbus.worker.session import NO_TURN, WorkerSession, hello_of
from tokenbus_contracts import BatchHeader, BatchKind, ContractError, LogprobBatch, Rule, Scoring, encode
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.control_pb2 import Control
from tokenbus_contracts.generated.request_pb2 import Abort, ErrorCode, Generate, RequestEvent
from tokenbus_contracts.generated.stream_pb2 import PayloadKind
from tokenbus_contracts.schema import MAJOR, MINOR, NO_COLUMNS

_log = logger("worker")
_ALTERNATIVES = ("alternative_token_ids", "alternative_logprobs")
_SHED = (
    *("given_counts", "given_token_ids", "given_logprobs", "mask_bounds", "mask_sizes", "mask_token_ids"),
    *_ALTERNATIVES,
)
"""Columns that are empty for shed rows, which lose their alternatives because retention is full."""
_MAX_STALLED_MS = 2**32 - 1


@dataclass(slots=True)
class WorkerCounts:
    """Counters of the engine's loop, for heartbeats and metrics."""

    signs: int = 0
    """Number of calls by the engine's loop to the publisher, which grows while the engine makes progress."""
    commands: int = 0
    """1 while the engine runs an operator's command, which may take long, and 0 otherwise."""
    kv_cache: int = 0
    """Fill level of the engine's KV cache in thousandths, plus one, or 0 if unknown."""
    failed_steps: int = 0
    """Number of steps that raised an exception."""
    engine_errors: int = 0
    """Number of exceptions of `admit` and `abort`, except for ValueErrors of `admit`."""


class Publisher:
    """Stream of one engine's process, open within a `with` or `async with` block.

    `with Publisher(settings) as publisher` runs the connection in a background thread. `async with` runs the connection
    on the current event loop. At the end of the block, the publisher waits at most `worker.drain_timeout_ms` for all
    acks. After an exception, the publisher leaves at once. Any thread may call `publish`.

    Example:
        publisher = tokenbus.Publisher(tokenbus.Settings.load(), vocabulary_size=64)
        with publisher:  # connects in the background, and the processor need not be running yet
            print(publisher.worker_id, publisher.epoch, publisher.take_requests())
    """

    def __init__(  # noqa: PLR0913 - each but the first is given by name
        self,
        settings: Settings | None = None,
        *,
        vocabulary_size: int = 0,
        epoch: int | None = None,
        description: EngineDescription = NO_DESCRIPTION,
        transport: Transport | None = None,
        clock: Clock | None = None,
        retention: Retention | None = None,
        incoming: RequestQueue | None = None,
        proof: bytes = b"",
    ) -> None:
        """Create a publisher, or raise SettingsError for settings that cannot be used.

        By default, the settings come from the environment, and the epoch is the current time. A publisher that takes
        over a stream gets the stream's epoch, retention and proof.
        """
        self.settings = settings or Settings.load()
        worker, bus = self.settings.worker, self.settings.bus
        self.worker_id = worker.id
        self.epoch = epoch or time.time_ns()
        self._limits = self.settings.limits
        if retention is None:
            retention = Retention(worker.most_items, worker.retention_bytes, checksum=worker.checksum)
        self.retention = retention
        self.incoming = RequestQueue(worker.max_requests) if incoming is None else incoming
        self._publishing = threading.Lock()  # held even while a batch waits for retention, to keep batches in order
        self._room = threading.Condition()
        addresses = listed_addresses(bus.workers_address)
        # Each worker orders the addresses by hashes of its id and an address, so that workers use different processors.
        self._addresses = sorted(
            addresses, key=lambda address: blake2b(f"{self.worker_id} {address}".encode(), digest_size=8).digest()
        )
        self.session = WorkerSession(
            hello_of(self.settings, vocabulary_size, description),
            self.epoch,
            self.retention,
            interval=bus.heartbeat_interval_ms / 1000,
            timeout=bus.heartbeat_timeout_ms / 1000,
            on_request=self.incoming.put,
            on_room=self._made_room,
            proof=proof,
            processors=len(addresses),
            abandon_after=worker.abandon_after_ms / 1000,
        )
        self.session.on_epoch = self._begin_epoch
        self.session.stalled_ms = self._stalled_ms
        self.session.kv_cache = lambda: self.counts.kv_cache
        if description.takes_control:
            self.session.on_control = self.incoming.put_control
        self.clock = clock or clock_for(addresses[0])
        self._transport = transport
        self.link = Link(self.session, self._room, self.clock, "worker")
        self._vocabulary_size = vocabulary_size
        self._last_step = 0
        self._last_request_ids = b""
        self._running = False
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None
        self.counts = WorkerCounts()
        self._last_signs, self._progressed_at = -1, 0.0
        self._waits_for_room = False
        self.gated = 0
        """Number of batches and events that this rank left to another rank."""
        self.shed = 0
        """Number of batches that lost their alternatives because retention was full."""
        self.starts = 1
        """Number of publisher processes that this stream has had."""
        self.failed = 0
        """Number of rows whose requests ended because retention was full."""
        self.blocked = 0
        """Number of batches that had to wait because retention was full."""
        self.blocked_seconds = 0.0

    def __enter__(self) -> "Publisher":
        self._thread, _ = start_loop_thread(f"tokenbus-{self.worker_id}", self._run)
        return self

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        self._close(error)
        if self._thread is not None:
            self._thread.join()

    async def __aenter__(self) -> "Publisher":
        self._task = await self._start()
        return self

    async def __aexit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        self._close(error)
        if self._task is not None:
            await self._task

    def _close(self, error: BaseException | None) -> None:
        self.end()
        self.link.stop(0 if error else self.settings.worker.drain_timeout_ms / 1000)

    async def _run(self, started: Future[None]) -> None:
        running = await self._start()
        started.set_result(None)
        await running

    async def _start(self) -> asyncio.Task[None]:
        transport = self._transport or transport_for(self.settings.bus, self.settings.bus.workers_address)
        running = await self.link.start(transport, self._addresses)
        self.begin()
        running.add_done_callback(lambda _: self.end())  # items that are published later would not be sent
        return running

    def begin(self) -> None:
        """Accept batches from now on. Without `with`, the caller must transport the session's messages."""
        self._running = True

    def end(self) -> None:
        """Accept no more batches, and wake the threads that wait."""
        with self._room:
            self._running = False
            self._room.notify_all()
        self.incoming.close()

    @property
    def is_running(self) -> bool:
        """Whether batches can be published."""
        return self._running

    @property
    def waiting_records(self) -> int:
        """Number of unpublished steps and events of an engine in another process."""
        return 0

    @property
    def _engine_waits(self) -> bool:
        return self._waits_for_room

    def _stalled_ms(self, now: float) -> int:
        """Return for how many milliseconds the engine has had requests without making progress.

        An engine that gets its requests from its own server, such as vLLM's, never counts as stalled.
        """
        counts = self.counts
        has_work = self.settings.worker.max_requests and self.session.requests and not counts.commands
        if not has_work or self._engine_waits or counts.signs != self._last_signs:
            self._last_signs, self._progressed_at = counts.signs, now
        return min(_MAX_STALLED_MS, round(1000 * (now - self._progressed_at)))

    def publish(self, batch: LogprobBatch) -> int:
        """Publish one batch, and return its sequence.

        The sequence is 0 if another rank publishes the batch or the batch's requests were given up. `publish` sets the
        worker's id, the epoch and the sequence of the header. `publish` never waits for the network, but blocks while
        retention is full under the policies `block` and `shed`. Raises ContractError if the batch breaks the contract,
        RetentionFullError if retention stays full, and NotRunningError outside of `with`.
        """
        if self.settings.worker.tp_rank:
            self.gated += 1
            return 0
        with self._publishing:
            self._check_running()
            epoch = self.epoch
            payload = encode(self.addressed(batch), self._limits)
            with self._room:  # one lock for both changes, so that a hello with the item also names the item's requests
                sequence = self._retain(PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH, payload, batch.request_ids, epoch)
                if not sequence:
                    self.session.ended(_leaving(batch), self.clock.now())
                # A draft batch may follow the row that ended a request, and must not add this request again.
                elif batch.header.kind is BatchKind.TARGET:
                    self._update_requests(batch)
            self._last_step = max(self._last_step, batch.header.step)
        return sequence

    def _update_requests(self, batch: LogprobBatch) -> None:
        request_ids = batch.request_ids.tobytes()
        if request_ids != self._last_request_ids:  # most steps have the same requests as the previous step
            self._last_request_ids = request_ids
            for request_id in batch.request_ids.tolist():
                self.session.requests.setdefault(request_id, NO_TURN)
        if leaving := _leaving(batch):
            self._end_requests(leaving)

    async def published(self, batch: LogprobBatch) -> int:
        """Publish one batch as `publish` does, without blocking the event loop while retention is full."""
        with self._room:
            has_room = self.retention.has_room(self._limits.max_message_bytes)
        if has_room and not self._publishing.locked():
            return self.publish(batch)
        return await asyncio.to_thread(self.publish, batch)

    def admitted(self, request_id: int, prompt_tokens: int, cached_tokens: int | None = None) -> int:
        """Publish that the engine admitted a request. Returns and raises as `publish` does.

        If an engine learns the number of cached tokens later, the engine repeats the admission before the first row.
        """
        return self.publish_event(admitted_event(request_id, prompt_tokens, cached_tokens))

    def failed_request(self, request_id: int, code: ErrorCode, message: str, emitted_tokens: int = 0) -> int:
        """Publish that a request ended with an error. Returns and raises as `publish` does."""
        return self.publish_event(error_event(request_id, code, message, emitted_tokens))

    def publish_event(self, event: RequestEvent) -> int:
        """Publish an event, and set its sequence. Returns and raises as `publish` does."""
        kind = event.WhichOneof("event")
        request_ids: list[int] = [] if kind == "control_answer" else [getattr(event, str(kind)).request_id]
        with self._room:
            if kind == "admitted":
                event.admitted.worker_id, event.admitted.epoch = self.worker_id, self.epoch
                self.session.describe(event.admitted)
            elif kind == "error":
                self._end_requests(request_ids)
            elif event.control_answer.HasField("state"):
                self.session.set_engine_state(event.control_answer.state)
        if self.settings.worker.tp_rank:
            self.gated += 1
            return 0
        with self._publishing:
            self._check_running()
            epoch, event.sequence = self.epoch, self.retention.next_sequence
            payload = write_frame(event)
            return self._retain(
                PayloadKind.PAYLOAD_KIND_REQUEST_EVENT, payload, np.array(request_ids, np.uint64), epoch
            )

    def addressed(self, batch: LogprobBatch) -> LogprobBatch:
        """Return the batch with this worker's id, epoch and next sequence, perhaps without its alternatives.

        Raises ContractError if the step is so old that a processor would discard it as a duplicate.
        """
        oldest = self._last_step - self.settings.processor.max_open_steps
        if batch.header.step < oldest:
            raise ContractError("header.step", oldest, batch.header.step, rule=Rule.MIN)
        worker = self.settings.worker
        header = batch.header._replace(
            worker_id=self.worker_id,
            epoch=self.epoch,
            sequence=self.retention.next_sequence,
            tp_rank=worker.tp_rank,
            dp_rank=worker.dp_rank,
            vocabulary_size=batch.header.vocabulary_size or self._vocabulary_size,
            produced_at_ns=batch.header.produced_at_ns or time.time_ns(),
            schema_major=MAJOR,
            schema_minor=MINOR,
        )
        if worker.policy == "shed" and self.retention.share_used() >= worker.shed_at:
            self.shed += 1
            return _without_alternatives(header, batch)
        return batch.headed(header)

    def _retain(self, kind: PayloadKind, payload: bytes, request_ids: npt.NDArray[np.uint64], epoch: int) -> int:
        """Retain an item, and return its sequence, or 0 if its requests belong to a processor that was given up."""
        self.counts.signs += 1
        with self._room:
            if not self.retention.has_room(len(payload)) and not self._wait_for_room(len(payload)):
                ids: list[int] = request_ids.tolist()
                self.lose(ids)
                worker = self.settings.worker
                why = "policy fail" if worker.policy == "fail" else f"waited {worker.block_timeout_ms} ms"
                raise RetentionFullError(ids, len(self.retention), self.retention.bytes, why)
            # The engine gets no new requests before it has ended all requests that were given up.
            if epoch != self.epoch or (request_ids.size and self.session.given_up):
                return 0
            sequence = self.retention.keep(kind, payload).sequence
            self.link.wake()
        return sequence

    def lose(self, request_ids: list[int]) -> None:
        """Skip a sequence of the stream. The gap ends the given requests with an error."""
        with self._room:
            if request_ids:  # a gap that names no request ends all requests of the stream
                self.retention.drop(request_ids)
                # If a lost row was the last row of its request, no later batch would remove the request.
                self._end_requests(request_ids)
            self.failed += len(request_ids)
            self.link.wake()

    def lose_all(self) -> None:
        """Skip a sequence of the stream. The gap ends all requests, because the requests that lost rows are unknown."""
        with self._room:
            self.retention.drop(())
            self._end_requests([*self.session.requests, *self.session.given_up])
            self.link.wake()

    def _end_requests(self, request_ids: Iterable[int]) -> None:
        self.session.ended(request_ids, self.clock.now())
        self._last_request_ids = b""

    def _wait_for_room(self, size: int) -> bool:
        if self.settings.worker.policy == "fail":
            return False
        if threading.get_ident() == self.link.thread_id:
            raise WouldWaitError(
                "retention is full, and this thread empties it: use `await publisher.published(batch)`"
            )
        seconds = self.settings.worker.block_timeout_ms / 1000
        self.blocked += 1
        began = self.clock.now()
        self._waits_for_room = True
        found = self._room.wait_for(lambda: not self._running or self.retention.has_room(size), seconds)
        self._waits_for_room = False
        self.blocked_seconds += self.clock.now() - began
        self._check_running()
        return found

    def _check_running(self) -> None:
        if not self._running:
            raise NotRunningError("the publisher is not running: it was not started, or it was closed")

    def _begin_epoch(self, epoch: int) -> None:
        ended = len(self.session.requests) if self.settings.worker.max_requests else 0
        dropped = len(self.retention)
        _log.warning("processor abandoned", epoch=epoch, requests_ended=ended, items_dropped=dropped)
        self.epoch = epoch
        self._last_request_ids = b""
        self._made_room()

    def _made_room(self) -> None:
        """Wake the threads that wait for free retention. The link's thread calls this method with the lock held."""
        self._room.notify_all()

    def take_requests(self, seconds: float = 0) -> list[Generate | Abort]:
        """Return the requests and aborts since the last call. Block for at most `seconds` while there are none."""
        self.counts.signs += 1
        return self.incoming.take(seconds)

    def take_controls(self) -> list[Control]:
        """Return the operators' commands since the last call, in order. A command may come twice."""
        return self.incoming.take_controls()

    def take_no_more(self) -> None:
        """Tell the processor to send no new requests. The worker finishes its open requests."""
        with self._room:
            self.session.take_no_more()
        self.link.wake()


def _leaving(batch: LogprobBatch) -> list[int]:
    leaving: list[int] = batch.request_ids[LEAVES[batch.statuses]].tolist()
    return leaving


def _without_alternatives(header: BatchHeader, batch: LogprobBatch) -> LogprobBatch:
    """Return the batch without alternatives, masks and requested ids. Rows that had such values are marked as shed."""
    columns = batch.columns
    shed = np.zeros(batch.row_count, np.bool_)
    for name in ("top_ks", "given_counts", "mask_bounds"):
        if name in columns and columns[name].size:
            shed |= columns[name] > 0
    kept = {name: values for name, values in columns.items() if name not in _SHED}
    kept["scorings"] = np.where(shed, np.uint8(Scoring.SHED), batch.scorings)
    kept["top_ks"] = np.zeros_like(batch.top_ks)
    return LogprobBatch.of_views(header, kept | {name: NO_COLUMNS[name] for name in _ALTERNATIVES})
