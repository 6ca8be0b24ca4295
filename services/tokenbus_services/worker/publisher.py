"""Publisher: what an engine embeds to publish its batches and to take its requests."""

import asyncio
import threading
import time
from collections import deque
from concurrent.futures import Future
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import BatchHeader, BatchKind, ContractError, LogprobBatch, Rule, Scoring, encode
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.request_pb2 import Abort, Admitted, ErrorCode, Generate, RequestError, RequestEvent
from tokenbus_contracts.generated.stream_pb2 import PayloadKind
from tokenbus_contracts.schema import MAJOR, MINOR, NO_COLUMNS
from tokenbus_services.bus import Transport, transport_for
from tokenbus_services.clock import Clock, SystemClock
from tokenbus_services.delivery.errors import brief
from tokenbus_services.delivery.final_statuses import LEAVES
from tokenbus_services.link import Link
from tokenbus_services.logs import logger
from tokenbus_services.settings import Settings
from tokenbus_services.worker.counts import WorkerCounts
from tokenbus_services.worker.errors import NotRunningError, RetentionFullError, WouldWaitError
from tokenbus_services.worker.handshake import HandoffPoint, hello_of
from tokenbus_services.worker.retention import Retention
from tokenbus_services.worker.session import WorkerSession
from tokenbus_services.worker.taken import TakenOver

_log = logger("worker")


class Publisher:
    """One engine process's stream.

    `with Publisher(settings) as publisher` runs the connection in a thread of its own, for an engine with its
    own loop; `async with` runs it on the current event loop. `publish` may be called from any thread.

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
        handoff: HandoffPoint = HandoffPoint(),  # noqa: B008 - it cannot be changed
        transport: Transport | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Take the settings and the model's vocabulary; a later epoch than this process's time may be given.

        A decode worker says where prefill workers hand requests off to it.
        """
        self.settings = settings or Settings.load()
        self.worker_id = self.settings.worker.id
        self.epoch = epoch or time.time_ns()
        worker = self.settings.worker
        self._limits = self.settings.limits
        self._retention = Retention(worker.retention_items, worker.retention_bytes, checksum=worker.checksum)
        self._publishing = threading.Lock()  # held while waiting for room, so that batches keep their order
        self._room = threading.Condition()
        self._requests: deque[Generate | Abort] = deque()
        self._taken_over: deque[TakenOver] = deque()
        self._arrived = threading.Condition()
        self._session = WorkerSession(
            hello_of(self.settings, vocabulary_size, handoff),
            self.epoch,
            self._retention,
            interval=self.settings.bus.heartbeat_interval_ms / 1000,
            timeout=self.settings.bus.heartbeat_timeout_ms / 1000,
        )
        self._session.on_request = self._take_request
        self._session.on_room = self._room.notify_all
        self._clock = clock or SystemClock()
        self._transport = transport
        self._link = Link(self._session, self._room, self._clock, "worker")
        self._vocabulary_size = vocabulary_size
        self._last_step = 0
        self._noted_keys = b""
        self._running = False
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None
        self.counts = WorkerCounts()
        self.gated = 0
        """How many batches and events were not this rank's to publish."""
        self.shed = 0
        """How many batches lost their alternatives for want of room."""
        self.failed = 0
        """How many rows' requests ended for want of room."""
        self.blocked = 0
        """How many batches had to wait for room."""
        self.blocked_seconds = 0.0
        """How long they waited in all."""

    # Its life.

    def __enter__(self) -> Self:
        """Start, in a thread of its own."""
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run_thread, args=(started,), name=f"tokenbus-{self.worker_id}")
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self._thread.join()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take nothing more, wait until all is acknowledged or the drain's time is over, and leave."""
        self._close(error)
        if self._thread is not None:
            self._thread.join()

    async def __aenter__(self) -> Self:
        """Start, on this event loop."""
        started: Future[None] = Future()
        self._task = asyncio.create_task(self._run(started))
        await asyncio.wait([self._task, asyncio.wrap_future(started)], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take nothing more, wait until all is acknowledged or the drain's time is over, and leave."""
        self._close(error)
        if self._task is not None:
            await self._task

    def _close(self, error: BaseException | None) -> None:
        self._stop_taking()
        self._link.stop(0 if error else self.settings.worker.drain_timeout_ms / 1000)

    def _run_thread(self, started: Future[None]) -> None:
        try:
            asyncio.run(self._run(started))
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to who started the thread
            if not started.done():
                started.set_exception(error)
            else:
                _log.exception("the publisher's thread ended")

    async def _run(self, started: Future[None]) -> None:
        def _connected() -> None:
            self._running = True
            started.set_result(None)

        transport = self._transport or transport_for(self.settings.bus)
        try:
            await self._link.run(transport, self.settings.bus.workers_address, _connected)
        finally:  # whyever it ended: what is published now would go nowhere
            self._stop_taking()

    def _stop_taking(self) -> None:
        with self._room:
            self._running = False
            self._room.notify_all()
        with self._arrived:
            self._arrived.notify_all()

    @property
    def is_running(self) -> bool:
        """Whether batches are taken."""
        return self._running

    @property
    def link(self) -> Link:
        """What carries its messages."""
        return self._link

    @property
    def retention(self) -> Retention:
        """What is kept until it is acknowledged."""
        return self._retention

    @property
    def session(self) -> WorkerSession:
        """The worker's side of the protocol."""
        return self._session

    @property
    def waiting_requests(self) -> int:
        """How many requests the engine has not taken yet."""
        return len(self._requests)

    # What goes out.

    def publish(self, batch: LogprobBatch, *, every_rank: bool = False) -> int:
        """Publish one batch; return its sequence, or 0 where it is not this rank's to publish.

        Worker, epoch and sequence are filled in here, whatever the header says. It never waits for the network;
        it waits only under the policies `block` and `shed`, and only while retention is full. A batch that
        breaks the contract is a ContractError, and one that finds no room a RetentionFullError: then the
        batch's requests end with an error, and all of them are named in it.
        """
        if self.settings.worker.tp_rank and not every_rank:
            self.gated += 1
            return 0
        with self._publishing:
            self._check_running()
            payload = encode(self.addressed(batch), self._limits)
            with self._room:  # for both, so that no hello tells of the item and not of its requests
                sequence = self._keep(PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH, payload, batch.request_keys)
                # What was drafted in a request's last step comes after the row that ended it.
                if batch.header.kind is BatchKind.TARGET:
                    self._note(batch)
            self._last_step = max(self._last_step, batch.header.step)
        return sequence

    def _note(self, batch: LogprobBatch) -> None:
        """Know which requests there are after a batch of theirs."""
        keys = batch.request_keys.tobytes()
        # Step after step has the same requests, most of the time.
        if keys != self._noted_keys:
            self._session.requests.update(batch.request_keys.tolist())
        leaving = LEAVES[batch.statuses]
        if leaving.any():
            self._session.requests.difference_update(batch.request_keys[leaving].tolist())
            keys = b""
        self._noted_keys = keys

    async def published(self, batch: LogprobBatch, *, every_rank: bool = False) -> int:
        """Publish one batch as `publish` does, and let the event loop go on while retention is full."""
        with self._room:
            has_room = self._retention.has_room(self._limits.max_message_bytes)
        if has_room and not self._publishing.locked():
            return self.publish(batch, every_rank=every_rank)
        return await asyncio.to_thread(self.publish, batch, every_rank=every_rank)

    def admitted(self, key: int, prompt_tokens: int) -> int:
        """Tell that the engine took a request; return the event's sequence, or 0: not this rank's to tell."""
        admitted = Admitted(
            request_key=key, worker_id=self.worker_id, epoch=self.epoch, prompt_tokens=max(1, prompt_tokens)
        )
        return self._publish_event(key, RequestEvent(admitted=admitted))

    def failed_request(self, key: int, code: ErrorCode, message: str, emitted_tokens: int = 0) -> int:
        """Tell that a request ended with an error; return the event's sequence, or 0 as above."""
        self.forget(key)
        error = RequestError(request_key=key, code=code, message=brief(message, code), emitted_tokens=emitted_tokens)
        return self._publish_event(key, RequestEvent(error=error))

    def _publish_event(self, key: int, event: RequestEvent) -> int:
        if self.settings.worker.tp_rank:
            self.gated += 1
            return 0
        with self._publishing:
            self._check_running()
            event.sequence = self._retention.next_sequence
            return self._keep(PayloadKind.PAYLOAD_KIND_REQUEST_EVENT, write_frame(event), np.array([key], np.uint64))

    def addressed(self, batch: LogprobBatch) -> LogprobBatch:
        """Return a batch as it goes out next: with this worker's name, the next sequence, and no more than may be."""
        # A processor takes the step of long ago for a repetition: better said here, where it can be mended.
        oldest = self._last_step - self.settings.processor.max_open_steps
        if batch.header.step < oldest:
            raise ContractError("header.step", oldest, batch.header.step, rule=Rule.MIN)
        header = batch.header._replace(
            worker_id=self.worker_id,
            epoch=self.epoch,
            sequence=self._retention.next_sequence,
            tp_rank=self.settings.worker.tp_rank,
            dp_rank=self.settings.worker.dp_rank,
            vocabulary_size=batch.header.vocabulary_size or self._vocabulary_size,
            produced_at_ns=batch.header.produced_at_ns or time.time_ns(),
            schema_major=MAJOR,
            schema_minor=MINOR,
        )
        if self.settings.worker.policy == "shed" and self._retention.share_used() >= self.settings.worker.shed_at:
            self.shed += 1
            return _without_alternatives(header, batch)
        return batch.headed(header)

    def _keep(self, kind: PayloadKind, payload: bytes, of: npt.NDArray[np.uint64]) -> int:
        with self._room:
            if not self._retention.has_room(len(payload)) and not self._wait_for_room(len(payload)):
                keys: list[int] = of.tolist()
                if keys:  # a gap that names nobody would be everybody's
                    self._retention.drop(keys)
                    # Their last row may be among these, and then no other would say that they are gone.
                    self._session.requests.difference_update(keys)
                    self._noted_keys = b""
                self._link.wake()
                self.failed += len(keys)
                worker = self.settings.worker
                why = "policy fail" if worker.policy == "fail" else f"waited {worker.block_timeout_ms} ms"
                raise RetentionFullError(keys, len(self._retention), self._retention.bytes, why)
            sequence = self._retention.keep(kind, payload).sequence
            self._link.wake()
        return sequence

    def _wait_for_room(self, size: int) -> bool:
        if self.settings.worker.policy == "fail":
            return False
        if threading.get_ident() == self._link.thread_id:
            raise WouldWaitError(
                "retention is full, and this thread empties it: use `await publisher.published(batch)`"
            )
        seconds = self.settings.worker.block_timeout_ms / 1000
        self.blocked += 1
        began = self._clock.now()
        found = self._room.wait_for(lambda: not self._running or self._retention.has_room(size), seconds)
        self.blocked_seconds += self._clock.now() - began
        self._check_running()
        return found

    def _check_running(self) -> None:
        if not self._running:
            raise NotRunningError("the publisher is not running: it was not started, or it was closed")

    # What comes in.

    def take_requests(self, seconds: float = 0) -> list[Generate | Abort]:
        """Return the requests that came since the last call; wait for some at most so many seconds."""
        with self._arrived:
            if seconds:
                self._arrived.wait_for(lambda: self._requests or self._taken_over or not self._running, seconds)
            taken = list(self._requests)
            self._requests.clear()
        return taken

    def take_no_more(self) -> None:
        """Tell the processor that this worker leaves when its requests are done, so that others get the new ones."""
        with self._room:
            self._session.take_no_more()
        self._link.wake()

    def hand_in(self, taken: TakenOver) -> None:
        """Give the engine a request that another worker began; a processor that comes back is told that it is here."""
        with self._room:
            self._session.begin(taken.generate)
        with self._arrived:
            self._taken_over.append(taken)
            self._arrived.notify_all()

    def take_handoffs(self) -> list[TakenOver]:
        """Return the requests that others handed off to this worker since the last call."""
        with self._arrived:
            taken = list(self._taken_over)
            self._taken_over.clear()
        return taken

    def forget(self, key: int) -> None:
        """Learn that the engine did not take a request over: whoever began it says so."""
        with self._room:
            self._session.requests.discard(key)
            self._noted_keys = b""

    def _take_request(self, request: Generate | Abort) -> None:
        """Keep a request for the engine: called on the link's thread."""
        most = 2 * self.settings.worker.max_requests  # as many may be aborted as may be open
        with self._arrived:
            if len(self._requests) >= most:
                # A processor keeps to max_requests, and gives up what is not admitted in time.
                limit = f"at most {most} requests that the engine has not taken yet"
                raise ContractError("generate", limit, len(self._requests) + 1)
            self._requests.append(request)
            self._arrived.notify_all()


def _without_alternatives(header: BatchHeader, batch: LogprobBatch) -> LogprobBatch:
    """Return the batch with its tokens, logprobs and ranks, but without alternatives, and its rows marked as shed."""
    shed = {name: NO_COLUMNS[name] for name in ("alternative_token_ids", "alternative_logprobs")}
    shed["scorings"] = np.where(batch.top_ks > 0, np.uint8(Scoring.SHED), batch.scorings)
    shed["top_ks"] = np.zeros_like(batch.top_ks)
    return LogprobBatch.of_views(header, batch.columns | shed)
