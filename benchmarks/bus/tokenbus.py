"""Tokenbus's two halves: a Publisher in one process, a Processor and its consumers in the other."""

import asyncio
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.bus.orders import BUFFERS, BY_STEP, ROWS, Order, Received, Sent, keys_of, step_at, steps_of
from benchmarks.bus.pace import Watch, send_all, sent
from benchmarks.bus.peers import Tell
from benchmarks.bus.sections import Sections
from benchmarks.codec.ours import Views, batch_of
from benchmarks.workload import Share
from tokenbus_contracts import LogprobBatch, RowStatus
from tokenbus_services.delivery import RequestTokens, Step
from tokenbus_services.processor import Processor
from tokenbus_services.settings import Settings
from tokenbus_services.worker import Publisher

RETENTION_ITEMS = 512
"""Fewer than the default, so that a turn's end does not wait for the thousands that a worker may keep."""
_LONG_MS = 3_600_000
"""Of every wait after which something is given up: on a busy machine each process may stand still for long."""
_PATIENT = (
    *("bus.heartbeat_timeout_ms", "bus.linger_ms"),
    *("worker.drain_timeout_ms", "worker.block_timeout_ms"),
    *("processor.unclaimed_timeout_ms", "processor.handoff_timeout_ms", "processor.drain_timeout_ms"),
    *("clients.detached_timeout_ms", "client.resume_timeout_ms", "client.drain_timeout_ms"),
)
_DRAIN_EVERY = 8
_IDLE_ROWS = 256
_LOOK_SECONDS = 0.01


def settings_of(order: Order, folder: str, **more: object) -> Settings:
    """Return the settings of both halves: the defaults, but that nothing is given up while a turn lasts."""
    return Settings.load(
        environment={},
        overrides={
            "bus.workers_address": order.address,
            "bus.clients_address": order.clients_address,
            "dead_letters.directory": folder,
            "worker.retention_items": RETENTION_ITEMS,
            "processor.slow_consumer": "wait",
            **dict.fromkeys(_PATIENT, _LONG_MS),
            **_keys(order),
            **more,
        },
    )


def _keys(order: Order) -> dict[str, object]:
    names = {"bus.key_file": "bench.key_secret", "bus.server_key": "bench.key", "bus.allowed_keys": "allowed.toml"}
    return {key: f"{order.keys}/{name}" for key, name in names.items()} if order.keys else {}


def send(order: Order) -> Sent:
    """Publish the steps; each begins when the engine's arrays are there, before the batch is made of them."""
    with tempfile.TemporaryDirectory() as folder, Publisher(settings_of(order, folder)) as publisher:
        for batch in _idle_batches(order, 0):
            publisher.publish(batch)
        watch = publish_all(order, publisher)
        answer = sent(watch)
        for batch in _idle_batches(order, watch.count + 1):
            publisher.publish(batch)
    # With idle requests, those that end them are no part of the steps' cost; else what still waits to go out is.
    return answer if order.open_requests > order.case.rows else sent(watch)


def publish_all(order: Order, publisher: Publisher, keys: list[int] | None = None) -> Watch:
    """Publish an order's steps, and one more that ends the requests."""
    rows, count = order.case.rows, order.case.tokens_per_row
    steps = steps_of(order)
    wanted = {} if keys is None else {"request_keys": np.array(keys, np.uint64)}
    headers = [batch_of(step).header for step in steps]
    first = len(_idle_keys(order)) // _IDLE_ROWS  # the steps that opened requests have numbers too

    def send_one(number: int, status: RowStatus = RowStatus.ACTIVE) -> None:
        columns = step_at(steps, number).columns | wanted
        columns["positions"] = np.full(rows, (number - 1) * count, np.uint32)
        if status is not RowStatus.ACTIVE:
            columns["statuses"] = np.full(rows, status, np.uint8)
        publisher.publish(LogprobBatch(headers[0]._replace(step=first + number), **columns))

    watch = send_all(order, send_one)
    send_one(watch.count + 1, RowStatus.FINISHED_LENGTH)
    return watch


def receive(order: Order, tell: Tell) -> Received:
    """Run a processor until the requests have ended, and take their rows as the order says."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_receive(order, tell, settings_of(order, folder)))


async def _receive(order: Order, tell: Tell, settings: Settings) -> Received:
    async with Processor(settings) as processor:
        receiver = _TAKERS[order.taking](order, processor)
        tell(processor.workers_address)
        await receiver.ended()
        await worker_left(processor)
        return receiver.received()


def shares_of(order: Order, batch: LogprobBatch) -> list[Share]:
    """Return what a batch has for the requests of the first step, in that step's order, whatever its own is."""
    rows = {index: row for row, index in enumerate(batch.batch_indices.tolist())}
    indices = steps_of(order)[0].columns["batch_indices"].tolist()
    return [Views().plain((batch, rows[index]), 0) for index in indices]


async def worker_left(processor: Processor) -> None:
    """Wait until the worker has had its last acknowledgement and is gone; a processor that ends sends it none."""
    while processor.workers.by_id:  # noqa: ASYNC110 - nothing tells, and nothing is measured any more
        await asyncio.sleep(_LOOK_SECONDS)


class Taker:
    """Notes when each step is with its requests; as it is, it takes their rows from the buffers all at once."""

    def __init__(self, order: Order, processor: Processor) -> None:
        """Claim the order's requests, and those that are only open."""
        self._order = order
        self._watch = Watch()
        self._sections = Sections()
        self._ended = asyncio.Event()
        self._waiting: list[Step] = []
        self._first: Step | None = None
        self._opening = self._closing = len(_idle_keys(order)) // _IDLE_ROWS
        self._cpu_ns = 0
        self._finished = False
        self._tokens: list[RequestTokens] = []
        self._idle = {key: processor.request(key) for key in _idle_keys(order)}
        self._claim(processor)
        processor.intake.step_observers.append(self._step)

    def _claim(self, processor: Processor) -> None:
        self._tokens = [processor.request(key) for key in keys_of(self._order)]

    def _step(self, step: Step) -> None:
        """Learn that a step's rows are in the buffers of their requests."""
        if self._opening or self._finished:
            self._take_idle(step)
            return
        if step.rows.statuses[0] != RowStatus.ACTIVE:
            self._finish(step)
            return
        self._watch.note()
        if self._first is None:
            self._first = step
            if self._order.is_profiled:
                self._sections.start()
        self._take(step)

    def _take(self, step: Step) -> None:
        self._waiting.append(step)
        if len(self._waiting) >= _DRAIN_EVERY:
            self._drain()

    def _drain(self) -> None:
        """Take the rows as a codec's benchmark does: at the cost of a call a request, not a call a row."""
        for tokens in self._tokens:
            tokens.waiting.clear()
        for step in self._waiting:
            step.pending_ack.release(len(self._tokens))
        self._waiting.clear()

    def _finish(self, step: Step) -> None:
        self._cpu_ns = self._watch.cpu_ns
        self._sections.stop()
        self._finished = True
        self._waiting.append(step)
        self._drain()
        if not self._closing:
            self._ended.set()

    def _take_idle(self, step: Step) -> None:
        """Take a step that begins or ends requests that have no other."""
        for key in step.rows.request_keys.tolist():
            self._idle[key].waiting.clear()
        step.pending_ack.release(step.rows.row_count)
        if self._opening:
            self._opening -= 1
            return
        self._closing -= 1
        if not self._closing:
            self._ended.set()

    async def ended(self) -> None:
        """Wait until the last step has come and its rows are taken."""
        await self._ended.wait()

    def received(self) -> Received:
        """Return what is known at the end."""
        at = self._watch.at
        seconds = (at[-1] - at[0]) / 1e9
        microseconds = seconds * 1e6 / max(1, at.size - 1)
        sections = {name: share * microseconds for name, share in self._sections.shares().items()}
        return Received(at, self._cpu_ns, self._shares(), self._taken_at(), sections if self._order.is_profiled else {})

    def _taken_at(self) -> "np.ndarray | None":
        return None

    def _shares(self) -> list[Share]:
        if self._first is None:
            return []
        return shares_of(self._order, self._first.rows)


class RowTaker(Taker):
    """A task for each request, which takes its rows as they come."""

    def _claim(self, processor: Processor) -> None:
        super()._claim(processor)
        self._stamps = [array("q") for _ in self._tokens]
        pairs = zip(self._tokens, self._stamps, strict=True)
        self._tasks = [asyncio.create_task(_take_rows(*pair)) for pair in pairs]

    def _take(self, step: Step) -> None:
        """Leave the rows to the tasks."""

    def _drain(self) -> None:
        """Leave the last row to the tasks too."""

    async def ended(self) -> None:
        """Wait for every request's end."""
        await asyncio.gather(*self._tasks)
        await super().ended()

    def _taken_at(self) -> "np.ndarray | None":
        return np.array([stamps[:-1] for stamps in self._stamps], np.int64)


class StepTaker(Taker):
    """One task that takes steps, whole and in batch order, as columns."""

    def _claim(self, processor: Processor) -> None:
        self._task = asyncio.create_task(_take_steps(processor))

    def _take(self, step: Step) -> None:
        """Leave the step to the task."""

    def _drain(self) -> None:
        """Leave the last step to the task too."""


_TAKERS: dict[str, Callable[[Order, Processor], Taker]] = {BUFFERS: Taker, ROWS: RowTaker, BY_STEP: StepTaker}


async def _take_steps(processor: Processor) -> None:
    async for step in processor.steps():
        step.target  # noqa: B018 - who asks for it has the step put in batch order


async def _take_rows(tokens: RequestTokens, stamps: "array[int]") -> None:
    now = time.monotonic_ns
    async for _ in tokens.rows():
        stamps.append(now())


def _idle_keys(order: Order) -> list[int]:
    """Return the requests that are open and have no rows in the steps."""
    more = max(0, order.open_requests - order.case.rows) // _IDLE_ROWS * _IDLE_ROWS
    mine = set(keys_of(order)) if more else set()
    return [key for key in range(1, 1 + more + len(mine)) if key not in mine][:more]


def _idle_batches(order: Order, after: int) -> Iterator[LogprobBatch]:
    """Yield the batches that open those with a token for each, or, after some steps, end them with another."""
    keys = _idle_keys(order)
    case = order.case._replace(rows=_IDLE_ROWS, tokens_per_row=1, top_k=0)
    step = steps_of(Order(case=case, address="", clients_address="", seed=order.seed))[0]
    number = after + len(keys) // _IDLE_ROWS if after else 0
    for begin in range(0, len(keys), _IDLE_ROWS):
        number += 1
        status = RowStatus.FINISHED_LENGTH if after else RowStatus.ACTIVE
        columns = step.columns | {
            "request_keys": np.array(keys[begin : begin + _IDLE_ROWS], np.uint64),
            "positions": np.full(_IDLE_ROWS, bool(after), np.uint32),
            "statuses": np.full(_IDLE_ROWS, status, np.uint8),
        }
        yield LogprobBatch(batch_of(step).header._replace(step=number), **columns)
