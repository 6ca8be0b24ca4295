"""Publisher: what an engine embeds to publish its batches and to take its requests."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tokenbus.bus import Transport, clock_for, transport_for
from tokenbus.bus.link import Link
from tokenbus.clock import Clock
from tokenbus.delivery.errors import brief
from tokenbus.delivery.step import LEAVES
from tokenbus.logs import logger
from tokenbus.loop_thread import start_loop_thread
from tokenbus.settings import Settings, listed_addresses
from tokenbus.worker.engine import DescribesModel
from tokenbus.worker.errors import NotRunningError, RetentionFullError, WouldWaitError
from tokenbus.worker.retention import Retention
from tokenbus.worker.session import WorkerSession, hello_of
from tokenbus_contracts import BatchHeader, BatchKind, ContractError, LogprobBatch, Rule, Scoring, encode
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.control_pb2 import Control, ControlAnswer
from tokenbus_contracts.generated.request_pb2 import (
    Abort,
    Admitted,
    ErrorCode,
    Generate,
    Prefilled,
    PromptScoresChunk,
    RequestError,
    RequestEvent,
)
from tokenbus_contracts.generated.stream_pb2 import PayloadKind
from tokenbus_contracts.schema import MAJOR, MINOR, NO_COLUMNS

_log = logger("worker")
T = TypeVar("T")
_MOST_CONTROLS = 64
"""As many as a processor lets wait for one worker."""
_ALTERNATIVES = ("alternative_token_ids", "alternative_logprobs")
_SHED = (
    *("given_counts", "given_token_ids", "given_logprobs", "mask_bounds", "mask_sizes", "mask_token_ids"),
    *_ALTERNATIVES,
)
"""The columns that a row that is shed has nothing in."""


_MOST_STALLED_MS = 2**32 - 1


@dataclass(slots=True)
class WorkerCounts:
    """Counters of the engine's loop; read by the metrics."""

    signs: int = 0
    """How often the engine asked for requests or handed something over: it makes progress when this changes."""
    commands: int = 0
    """1 while the engine runs an operator's command, which may take any time; else 0."""
    kv_cache: int = 0
    """How much of the engine's KV cache is in use, in thousandths plus one; 0: not known."""

    failed_steps: int = 0
    """Steps that raised."""
    engine_errors: int = 0
    """Requests that the engine failed to admit or to abort, with another exception than ValueError."""


class Publisher:
    """One engine process's stream, from `with` or `async with` until its end.

    `with Publisher(settings) as publisher` runs the connection in a thread of its own, for an engine with a loop of its
    own; `async with` runs it on the current event loop. At the end it takes nothing more, waits until all is
    acknowledged, at most for `worker.drain_timeout_ms`, and leaves; after an exception it leaves at once. Any thread
    may call `publish`.

    Example:
        publisher = tokenbus.Publisher(tokenbus.Settings.load(), vocabulary_size=64)
        with publisher:  # a thread of its own connects, and the processor need not be there yet
            print(publisher.worker_id, publisher.epoch, publisher.take_requests())
    """

    def __init__(  # noqa: PLR0913 - each but the first is given by name
        self,
        settings: Settings | None = None,
        *,
        vocabulary_size: int = 0,
        epoch: int | None = None,
        model: DescribesModel | None = None,
        transport: Transport | None = None,
        clock: Clock | None = None,
        retention: Retention | None = None,
        proof: bytes = b"",
        takes_control: bool = False,
        continues_requests: bool = False,
    ) -> None:
        """Take the settings, by default the environment's, and the size of the model's vocabulary.

        The epoch is this process's time unless a later one is given. `model` says what clients learn of the model. One
        that takes a stream over has its epoch, retention and proof. With `takes_control` operators' commands come, for
        `take_controls`. Raises SettingsError for settings that cannot be used.
        """
        self.settings = settings or Settings.load()
        self.worker_id = self.settings.worker.id
        self.epoch = epoch or time.time_ns()
        worker = self.settings.worker
        self._limits = self.settings.limits
        if retention is None:
            retention = Retention(worker.most_items, worker.retention_bytes, checksum=worker.checksum)
        self.retention = retention
        self._publishing = threading.Lock()  # held while waiting for room, to keep the batches' order
        self._room = threading.Condition()
        self._requests: deque[Generate | Abort] = deque()
        self._controls: deque[Control] = deque()
        self._arrived = threading.Condition()
        self.on_arrival: Callable[[], None] = lambda: None
        """Called with each request and command that comes for the engine."""
        bus = self.settings.bus
        addresses = listed_addresses(bus.workers_address)
        self._addresses = sorted(addresses, key=lambda address: _rank(self.worker_id, address))
        self.session = WorkerSession(
            hello_of(
                self.settings,
                vocabulary_size,
                model,
                takes_control=takes_control,
                continues_requests=continues_requests,
            ),
            self.epoch,
            self.retention,
            interval=bus.heartbeat_interval_ms / 1000,
            timeout=bus.heartbeat_timeout_ms / 1000,
            on_request=self.take_request,
            on_room=self._made_room,
            proof=proof,
            processors=len(addresses),
            abandon_after=worker.abandon_after_ms / 1000,
        )
        self.session.on_epoch = self._begin_epoch
        self.session.stalled_ms = self._stalled_ms
        self.session.kv_cache = lambda: self.counts.kv_cache
        if takes_control:
            self.session.on_control = self.take_control
        self.clock = clock or clock_for(addresses[0])
        self._transport = transport
        self.link = Link(self.session, self._room, self.clock, "worker")
        self._vocabulary_size = vocabulary_size
        self.last_step = 0
        self._last_keys = b""
        self._running = False
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None
        self.counts = WorkerCounts()
        self._signs, self._progressed_at = -1, 0.0
        """The engine's signs when they were looked at last, and when they were others, or it had nothing to do."""
        self._waits_for_room = False
        self.gated = 0
        """Batches and events that were not this rank's to publish."""
        self.shed = 0
        """Batches that lost their alternatives because retention was full."""
        self.starts = 1
        """How many publishers this stream has had, where each has a process of its own."""
        self.failed = 0
        """Rows whose requests ended because retention was full."""
        self.blocked = 0
        """Batches that had to wait for room in retention."""
        self.blocked_seconds = 0.0

    # Start and end.

    def __enter__(self) -> "Publisher":
        self._thread, _ = start_loop_thread(f"tokenbus-{self.worker_id}", self._run)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)
        if self._thread is not None:
            self._thread.join()

    async def __aenter__(self) -> "Publisher":
        self._task = await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        running.add_done_callback(lambda _: self.end())  # nothing that is published from now on would be sent
        return running

    def begin(self) -> None:
        """Let batches be published from now on; without `async with`, the caller carries the session's messages."""
        self._running = True

    def end(self) -> None:
        """Let no batch be published any more, and wake the threads that wait."""
        with self._room:
            self._running = False
            self._room.notify_all()
        with self._arrived:
            self._arrived.notify_all()

    @property
    def is_running(self) -> bool:
        """Whether batches can be published."""
        return self._running

    @property
    def waiting_requests(self) -> int:
        """How many requests and aborts wait for the engine."""
        return len(self._requests)

    @property
    def waiting_records(self) -> int:
        """How many steps and events of an engine in another process wait to be published."""
        return 0

    @property
    def _is_blocked(self) -> bool:
        """Whether the engine may have to wait for the publisher."""
        return self._waits_for_room

    def _stalled_ms(self, now: float) -> int:
        """Return for how long the engine has had requests and made no progress.

        One that gets no requests from processors, as a tap's, may rest whenever its own server likes.
        """
        counts = self.counts
        has_work = self.settings.worker.max_requests and self.session.requests and not counts.commands
        if not has_work or self._is_blocked or counts.signs != self._signs:
            self._signs, self._progressed_at = counts.signs, now
        return min(_MOST_STALLED_MS, round(1000 * (now - self._progressed_at)))

    # Outgoing: batches and events.

    def publish(self, batch: LogprobBatch) -> int:
        """Publish one batch; return its sequence, or 0: not this rank's to publish, or of requests that were given up.

        Worker, epoch and sequence of the header are filled in here. This never waits for the network; under the
        policies `block` and `shed` it blocks while retention is full. Raises ContractError for a batch that breaks the
        contract, RetentionFullError for one that finds no room (its requests end with an error, which names them), and
        NotRunningError outside of `with`.
        """
        if self.settings.worker.tp_rank:
            self.gated += 1
            return 0
        with self._publishing:
            self._check_running()
            epoch = self.epoch
            payload = encode(self.addressed(batch), self._limits)
            with self._room:  # both at once, so that a hello that counts the item names its requests
                sequence = self._keep(PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH, payload, batch.request_ids, epoch)
                if not sequence:
                    self.session.ended(_leaving(batch), self.clock.now())
                # A draft batch comes after the row that ended its request, so it adds none.
                elif batch.header.kind is BatchKind.TARGET:
                    self._update_requests(batch)
            self.last_step = max(self.last_step, batch.header.step)
        return sequence

    def _update_requests(self, batch: LogprobBatch) -> None:
        keys = batch.request_ids.tobytes()
        if keys != self._last_keys:  # most steps have the same requests as the one before
            self.session.requests.update(batch.request_ids.tolist())
        if leaving := _leaving(batch):
            self.session.requests.difference_update(leaving)
            keys = b""
        self._last_keys = keys

    async def published(self, batch: LogprobBatch) -> int:
        """Publish one batch as `publish` does, without blocking the event loop while retention is full."""
        with self._room:
            has_room = self.retention.has_room(self._limits.max_message_bytes)
        if has_room and not self._publishing.locked():
            return self.publish(batch)
        return await asyncio.to_thread(self.publish, batch)

    def admitted(self, key: int, prompt_tokens: int, cached_tokens: int | None = None) -> int:
        """Publish that the engine admitted a request; return the event's sequence, or 0: not this rank's to publish.

        It is published again before the request's first row, once more of its prompt is known to be cached.
        """
        admitted = Admitted(
            request_id=key,
            worker_id=self.worker_id,
            epoch=self.epoch,
            prompt_tokens=max(1, prompt_tokens),
            cached_tokens=cached_tokens,
        )
        with self._room:
            self.session.describe(admitted)
        return self._publish_event(key, RequestEvent(admitted=admitted))

    def scored(self, chunk: PromptScoresChunk) -> int:
        """Publish what the engine says of some of a prompt's tokens; return the event's sequence, or 0 as above."""
        return self._publish_event(chunk.request_id, RequestEvent(prompt_scores=chunk))

    def prefilled(self, prefilled: Prefilled) -> int:
        """Publish a request's transfer state; return the event's sequence, or 0 as above."""
        return self._publish_event(prefilled.request_id, RequestEvent(prefilled=prefilled))

    def failed_request(self, key: int, code: ErrorCode, message: str, emitted_tokens: int = 0) -> int:
        """Publish that a request ended with an error; return the event's sequence, or 0 as above."""
        with self._room:
            self.session.ended([key], self.clock.now())
            self._last_keys = b""
        error = RequestError(request_id=key, code=code, message=brief(message, code), emitted_tokens=emitted_tokens)
        return self._publish_event(key, RequestEvent(error=error))

    def controlled(self, answer: ControlAnswer) -> int:
        """Publish what became of a command; return the event's sequence, or 0 as above."""
        if answer.HasField("state"):
            with self._room:
                self.session.set_engine_state(answer.state)
        return self._publish_event(None, RequestEvent(control_answer=answer))

    def _publish_event(self, key: int | None, event: RequestEvent) -> int:
        if self.settings.worker.tp_rank:
            self.gated += 1
            return 0
        with self._publishing:
            self._check_running()
            epoch, event.sequence = self.epoch, self.retention.next_sequence
            keys = np.array([] if key is None else [key], np.uint64)
            return self._keep(PayloadKind.PAYLOAD_KIND_REQUEST_EVENT, write_frame(event), keys, epoch)

    def addressed(self, batch: LogprobBatch) -> LogprobBatch:
        """Return a batch with this worker's id and epoch and the next sequence, and with what the policy leaves of it.

        Raises ContractError for a step that is so old that a processor would take it for a duplicate.
        """
        oldest = self.last_step - self.settings.processor.max_open_steps
        if batch.header.step < oldest:
            raise ContractError("header.step", oldest, batch.header.step, rule=Rule.MIN)
        header = batch.header._replace(
            worker_id=self.worker_id,
            epoch=self.epoch,
            sequence=self.retention.next_sequence,
            tp_rank=self.settings.worker.tp_rank,
            dp_rank=self.settings.worker.dp_rank,
            vocabulary_size=batch.header.vocabulary_size or self._vocabulary_size,
            produced_at_ns=batch.header.produced_at_ns or time.time_ns(),
            schema_major=MAJOR,
            schema_minor=MINOR,
        )
        if self.settings.worker.policy == "shed" and self.retention.share_used() >= self.settings.worker.shed_at:
            self.shed += 1
            return _without_alternatives(header, batch)
        return batch.headed(header)

    def _keep(self, kind: PayloadKind, payload: bytes, of: npt.NDArray[np.uint64], epoch: int) -> int:
        """Retain what was written in an epoch, and return its sequence; 0: it is of requests that were given up."""
        self.counts.signs += 1
        with self._room:
            if not self.retention.has_room(len(payload)) and not self._wait_for_room(len(payload)):
                keys: list[int] = of.tolist()
                self.lose(keys)
                worker = self.settings.worker
                why = "policy fail" if worker.policy == "fail" else f"waited {worker.block_timeout_ms} ms"
                raise RetentionFullError(keys, len(self.retention), self.retention.bytes, why)
            # Of new requests the engine hears only once it has ended all others.
            if epoch != self.epoch or (of.size and self.session.given_up):
                return 0
            sequence = self.retention.keep(kind, payload).sequence
            self.link.wake()
        return sequence

    def lose(self, keys: list[int]) -> None:
        """Leave a gap in the stream that names requests: each of them ends with an error."""
        with self._room:
            if keys:  # a gap that names no request ends all of the stream's
                self.retention.drop(keys)
                # The rows may be the requests' last ones: no later batch would remove them.
                self.session.ended(keys, self.clock.now())
                self._last_keys = b""
            self.failed += len(keys)
            self.link.wake()

    def lose_all(self) -> None:
        """Leave a gap in the stream that ends all of its requests: which lost rows is not known."""
        with self._room:
            self.retention.drop(())
            self.session.ended(self.session.requests | self.session.given_up, self.clock.now())
            self._last_keys = b""
            self.link.wake()

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
        self._last_keys = b""
        self._made_room()

    def _made_room(self) -> None:
        """Wake who waits for room in retention; called on the link's thread, with the lock held."""
        self._room.notify_all()

    # Incoming: requests and aborts.

    def take_requests(self, seconds: float = 0) -> list[Generate | Abort]:
        """Return the requests and aborts that came since the last call; block for at most so many seconds for some."""
        self.counts.signs += 1
        with self._arrived:
            if seconds:
                self._arrived.wait_for(self._has_news, seconds)
            return _drained(self._requests)

    def _has_news(self) -> bool:
        return bool(self._requests or self._controls or not self._running)

    def take_controls(self) -> list[Control]:
        """Return operators' commands that came since the last call, in their order; one may come twice."""
        with self._arrived:
            return _drained(self._controls)

    def take_no_more(self) -> None:
        """Tell the processor that this worker finishes its requests and takes no new one."""
        with self._room:
            self.session.take_no_more()
        self.link.wake()

    def take_request(self, request: Generate | Abort) -> None:
        """Queue a request or an abort for the engine; called on the link's thread."""
        most = 2 * self.settings.worker.max_requests  # as many aborts as open requests
        if not most and isinstance(request, Abort):
            return  # its requests are not the processor's to end: it only shows them
        with self._arrived:
            if len(self._requests) >= most:
                # A processor keeps to max_requests, and fails a request that is not admitted in time.
                limit = f"at most {most} requests that the engine has not taken yet"
                raise ContractError("generate", limit, len(self._requests) + 1)
            self._arrive(self._requests, request)

    def take_control(self, control: Control) -> None:
        """Queue an operator's command for the engine; called on the link's thread."""
        with self._arrived:
            if any(each.control_key == control.control_key for each in self._controls):
                return  # sent again after a handshake
            if len(self._controls) >= _MOST_CONTROLS:
                limit = f"at most {_MOST_CONTROLS} commands that the engine has not taken yet"
                raise ContractError("control", limit, len(self._controls) + 1)
            self._arrive(self._controls, control)

    def _arrive(self, queue: deque[T], what: T) -> None:
        with self._arrived:
            queue.append(what)
            self._arrived.notify_all()
        self.on_arrival()


def _rank(worker_id: str, address: str) -> bytes:
    """Return the place of an address in the list of a worker, so that workers spread over processors."""
    return blake2b(f"{worker_id} {address}".encode(), digest_size=8).digest()


def _leaving(batch: LogprobBatch) -> list[int]:
    leaving: list[int] = batch.request_ids[LEAVES[batch.statuses]].tolist()
    return leaving


def _drained(queue: deque[T]) -> list[T]:
    found = list(queue)
    queue.clear()
    return found


def _without_alternatives(header: BatchHeader, batch: LogprobBatch) -> LogprobBatch:
    """Return the batch with one value a token of each kind, but no alternatives, and its rows marked as shed.

    What is shed of a row are the alternatives, the values of given tokens, and masks.
    """
    columns = batch.columns
    shed = np.zeros(batch.row_count, np.bool_)
    for name in ("top_ks", "given_counts", "mask_bounds"):
        if name in columns and columns[name].size:
            shed |= columns[name] > 0
    kept = {name: values for name, values in columns.items() if name not in _SHED}
    kept["scorings"] = np.where(shed, np.uint8(Scoring.SHED), batch.scorings)
    kept["top_ks"] = np.zeros_like(batch.top_ks)
    return LogprobBatch.of_views(header, kept | {name: NO_COLUMNS[name] for name in _ALTERNATIVES})
