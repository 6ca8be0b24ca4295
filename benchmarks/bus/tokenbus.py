"""Tokenbus's halves: a Publisher in one process, a Processor in another, and its consumers there or in a third one."""

import asyncio
import tempfile
import time
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.bus.pair import BUFFERS, BY_STEP, ROWS, Order, Received, Sent, Watch, send_all, step_at, steps_of
from benchmarks.codec.ours import batch_of, share_of
from benchmarks.workload import Share
from tests.support.settings import settings_of as of_values
from tokenbus_contracts import LogprobBatch, RowStatus
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TokenPrompt
from tokenbus_services.client import Client, Generation, RequestEnd, StepRows
from tokenbus_services.delivery import RequestTokens, Step
from tokenbus_services.processor import Processor
from tokenbus_services.settings import Settings
from tokenbus_services.worker import Publisher

_RETENTION_ITEMS = 512
"""Fewer than the default, so that a turn's end does not wait for the thousands that a worker may keep."""
_LONG_MS = 3_600_000
"""Of every wait after which something is given up: on a busy machine each process may stand still for long."""
_PATIENT = (
    "bus.heartbeat_timeout_ms",
    *("worker.drain_timeout_ms", "worker.block_timeout_ms"),
    *("processor.unclaimed_timeout_ms", "processor.handoff_timeout_ms", "processor.drain_timeout_ms"),
    *("clients.detached_timeout_ms", "client.resume_timeout_ms", "client.drain_timeout_ms"),
)
_DRAIN_EVERY = 8
_LOOK_SECONDS = 0.01
_WAIT_SECONDS = 0.1
_MANY = {"clients__send_queue_bytes": 1 << 29, "processor__pending_items": 512}
"""With a remote client: one that is slower than the worker makes it wait, and ends nothing."""


def settings_of(order: Order, folder: str, **more: object) -> Settings:
    """Return the settings of all: the defaults, but that nothing is given up while a turn lasts."""
    return of_values(
        {
            "bus.workers_address": order.address,
            "bus.clients_address": order.clients_address,
            "dead_letters.directory": folder,
            "worker.retention_items": _RETENTION_ITEMS,
            **dict.fromkeys(_PATIENT, _LONG_MS),
            **{name.replace("__", "."): value for name, value in more.items()},
        }
    )


def send(_connection: Connection, order: Order) -> Sent:
    with tempfile.TemporaryDirectory() as folder, Publisher(settings_of(order, folder)) as publisher:
        watch = _publish_all(order, publisher)
    return watch.sent  # what still waited to go out is part of the steps' cost


def send_asked(_connection: Connection, order: Order) -> Sent:
    """Wait until as many requests were asked for as a step has rows, and publish the steps for them."""
    with tempfile.TemporaryDirectory() as folder, Publisher(settings_of(order, folder, **_MANY)) as publisher:
        keys: list[int] = []
        while len(keys) < order.case.rows:
            keys += [request.request_key for request in publisher.take_requests(_WAIT_SECONDS)]
        for key in keys:
            publisher.admitted(key, 1)
        watch = _publish_all(order, publisher, keys)
    return watch.sent


def _publish_all(order: Order, publisher: Publisher, keys: list[int] | None = None) -> Watch:
    """Publish an order's steps, and one more that ends the requests."""
    rows, count = order.case.rows, order.case.tokens_per_row
    steps = steps_of(order)
    wanted = {} if keys is None else {"request_keys": np.array(keys, np.uint64)}
    header = batch_of(steps[0]).header

    def send_one(number: int, status: RowStatus = RowStatus.ACTIVE) -> None:
        columns = step_at(steps, number).columns | wanted
        columns["positions"] = np.full(rows, (number - 1) * count, np.uint32)
        if status is not RowStatus.ACTIVE:
            columns["statuses"] = np.full(rows, status, np.uint8)
        publisher.publish(LogprobBatch(header._replace(step=number), **columns))

    watch = send_all(order, send_one)
    send_one(watch.count + 1, RowStatus.FINISHED_LENGTH)
    return watch


def receive(connection: Connection, order: Order) -> Received:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_receive(connection, order, settings_of(order, folder)))


async def _receive(connection: Connection, order: Order, settings: Settings) -> Received:
    async with Processor(settings) as processor:
        taker = _TAKERS[order.taking](order, processor)
        connection.send(processor.workers_address)
        await taker.ended()
        await _worker_left(processor)
        return taker.received


async def _worker_left(processor: Processor) -> None:
    """Wait until the worker has had its last acknowledgement and is gone; a processor that ends sends it none."""
    while processor.workers.by_id:  # noqa: ASYNC110 - nothing tells, and nothing is measured any more
        await asyncio.sleep(_LOOK_SECONDS)


def _shares_of(order: Order, batch: LogprobBatch) -> list[Share]:
    """Return what a batch has for the requests of the first step, in that step's order, whatever its own is."""
    rows = {index: row for row, index in enumerate(batch.batch_indices.tolist())}
    indices = steps_of(order)[0].columns["batch_indices"].tolist()
    return [share_of(batch, rows[index]) for index in indices]


class Taker:
    """Notes when each step is with its requests; as it is, it takes their rows from the buffers all at once."""

    def __init__(self, order: Order, processor: Processor) -> None:
        self._order = order
        self._watch = Watch()
        self._ended = asyncio.Event()
        self._waiting: list[Step] = []
        self._first: Step | None = None
        self._cpu_ns = 0
        self._tokens: list[RequestTokens] = []
        self._claim(processor)
        processor.intake.step_observers.append(self._step)

    def _claim(self, processor: Processor) -> None:
        self._tokens = [processor.request(key) for key in steps_of(self._order)[0].keys]

    def _step(self, step: Step) -> None:
        is_last = step.rows.statuses[0] != RowStatus.ACTIVE
        if is_last:
            self._cpu_ns = self._watch.cpu_ns
        else:
            self._watch.note()
            self._first = self._first or step
        self._take(step, is_last=is_last)
        if is_last:
            self._ended.set()

    def _take(self, step: Step, *, is_last: bool) -> None:
        self._waiting.append(step)
        if len(self._waiting) < _DRAIN_EVERY and not is_last:
            return
        for tokens in self._tokens:
            tokens.waiting.clear()
        for each in self._waiting:
            each.pending_ack.release(len(self._tokens))
        self._waiting.clear()

    async def ended(self) -> None:
        await self._ended.wait()

    @property
    def received(self) -> Received:
        shares = [] if self._first is None else _shares_of(self._order, self._first.rows)
        return Received(self._watch.at, self._cpu_ns, shares, self._taken_at())

    def _taken_at(self) -> "np.ndarray | None":
        return None


class RowTaker(Taker):
    """A task for each request, which takes its rows as they come."""

    def _claim(self, processor: Processor) -> None:
        super()._claim(processor)
        self._stamps = [array("q") for _ in self._tokens]
        pairs = zip(self._tokens, self._stamps, strict=True)
        self._tasks = [asyncio.create_task(_take_rows(*pair)) for pair in pairs]

    def _take(self, step: Step, *, is_last: bool) -> None:
        """Leave the rows to the tasks."""

    async def ended(self) -> None:
        await asyncio.gather(*self._tasks)
        await super().ended()

    def _taken_at(self) -> "np.ndarray | None":
        return np.array([stamps[:-1] for stamps in self._stamps], np.int64)


class StepTaker(Taker):
    """One task that takes steps, whole and in batch order, as columns."""

    def _claim(self, processor: Processor) -> None:
        self._task = asyncio.create_task(_take_steps(processor))

    def _take(self, step: Step, *, is_last: bool) -> None:
        """Leave the step to the task."""


_TAKERS: dict[str, Callable[[Order, Processor], Taker]] = {BUFFERS: Taker, ROWS: RowTaker, BY_STEP: StepTaker}


async def _take_steps(processor: Processor) -> None:
    async for step in processor.steps():
        step.target  # noqa: B018 - its first reader has the step put in batch order


async def _take_rows(tokens: RequestTokens, stamps: "array[int]") -> None:
    now = time.monotonic_ns
    async for _ in tokens.rows():
        stamps.append(now())


def relay(connection: Connection, order: Order) -> None:
    """Run a processor until its worker and its client have left."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_relay(connection, settings_of(order, folder, **_MANY)))


async def _relay(connection: Connection, settings: Settings) -> None:
    async with Processor(settings) as processor:
        connection.send((processor.workers_address, processor.clients_address))
        while not processor.intake.steps or processor.clients.sessions:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(_LOOK_SECONDS)
        await _worker_left(processor)


def receive_remote(_connection: Connection, order: Order) -> Received:
    """Ask for the requests as a client, and note when each step is with all of them."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_receive_remote(order, settings_of(order, folder, **_MANY)))


async def _receive_remote(order: Order, settings: Settings) -> Received:
    watch = Watch()
    first: list[LogprobBatch] = []
    sampling = SamplingParameters(max_tokens=1)
    async with Client(settings) as client:
        requests = [
            client.generate(Generate(tokens=TokenPrompt(token_ids=[1]), sampling=sampling, top_logprobs=0))
            for _ in range(order.case.rows)
        ]

        def came(output: StepRows | RequestEnd) -> None:
            if isinstance(output, StepRows):
                watch.note()
                if not first:
                    first.append(output.target)

        client.requests.open_stream(came)
        await asyncio.gather(*map(_ended, requests))
        cpu_ns = watch.cpu_ns
    return Received(watch.at[:-1], cpu_ns, _shares_of(order, first[0]))


async def _ended(tokens: Generation) -> None:
    async for _ in tokens.rows():
        pass
