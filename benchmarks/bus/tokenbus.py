"""Tokenbus's halves: a Publisher in one process, a Processor in another, and its consumer there or in a third one."""

import asyncio
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.bus.pair import Order, Received, Sent, Watch, send_all, step_at, steps_of
from benchmarks.codec.ours import batch_of, share_of
from benchmarks.workload import Share
from tests.support.settings import settings_of as of_values
from tokenbus.client import Client, Generation, RequestEnd, StepRows
from tokenbus.processor import Processor
from tokenbus.settings import Settings
from tokenbus.worker import Publisher
from tokenbus_contracts import LogprobBatch, RowStatus
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TokenPrompt

_RETENTION_ITEMS = 512
"""Fewer than the default, so that a turn's end does not wait for the thousands that a worker may keep."""
_LONG_MS = 3_600_000
"""Of every wait after which something is given up: on a busy machine each process may stand still for long."""
_PATIENT = (
    "bus.heartbeat_timeout_ms",
    *("worker.drain_timeout_ms", "worker.block_timeout_ms"),
    *("processor.unclaimed_timeout_ms", "processor.drain_timeout_ms"),
    *("clients.detached_timeout_ms", "client.resume_timeout_ms", "client.drain_timeout_ms"),
)
_LOOK_SECONDS = 0.01
_WAIT_SECONDS = 0.1
_MANY = {"clients__send_queue_bytes": 1 << 29, "processor__pending_items": 512}
"""With a remote client: one that is slower than the worker makes it wait, and ends nothing."""


def settings_of(order: Order, **more: object) -> Settings:
    """Return the settings of all: the defaults, but that nothing is given up while a turn lasts."""
    return of_values(
        {
            "bus.workers_address": order.address,
            "bus.clients_address": order.clients_address,
            "worker.retention_items": _RETENTION_ITEMS,
            **dict.fromkeys(_PATIENT, _LONG_MS),
            **{name.replace("__", "."): value for name, value in more.items()},
        }
    )


def send(_connection: Connection, order: Order) -> Sent:
    with Publisher(settings_of(order)) as publisher:
        watch = _publish_all(order, publisher)
    return watch.sent  # what still waited to go out is part of the steps' cost


def send_asked(_connection: Connection, order: Order) -> Sent:
    """Wait until as many requests were asked for as a step has rows, and publish the steps for them."""
    with Publisher(settings_of(order, **_MANY)) as publisher:
        keys: list[int] = []
        while len(keys) < order.case.rows:
            keys += [request.request_id for request in publisher.take_requests(_WAIT_SECONDS)]
        for key in keys:
            publisher.admitted(key, 1)
        watch = _publish_all(order, publisher, keys)
    return watch.sent


def _publish_all(order: Order, publisher: Publisher, keys: list[int] | None = None) -> Watch:
    """Publish an order's steps, and one more that ends the requests."""
    rows, count = order.case.rows, order.case.tokens_per_row
    steps = steps_of(order)
    wanted = {} if keys is None else {"request_ids": np.array(keys, np.uint64)}
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
    """Take steps as columns, whole and in batch order, in the processor's own process."""
    return asyncio.run(_receive(connection, order, settings_of(order)))


async def _receive(connection: Connection, order: Order, settings: Settings) -> Received:
    watch, first = Watch(), list[LogprobBatch]()
    async with Processor(settings) as processor:
        connection.send(processor.workers_address)
        async for step in processor.steps():
            rows = step.target  # its first reader has the step put in batch order
            if rows.statuses[0] != RowStatus.ACTIVE:
                break
            watch.note()
            if not first:
                first.append(rows)
        cpu_ns = watch.cpu_ns
        await _worker_left(processor)
    return Received(watch.at, cpu_ns, _shares_of(order, first[0]))


async def _worker_left(processor: Processor) -> None:
    """Wait until the worker has had its last acknowledgement and is gone; a processor that ends sends it none."""
    while processor.workers.by_id:  # noqa: ASYNC110 - nothing tells, and nothing is measured any more
        await asyncio.sleep(_LOOK_SECONDS)


def _shares_of(order: Order, batch: LogprobBatch) -> list[Share]:
    """Return what a batch has for the requests of the first step, in that step's order, whatever its own is."""
    rows = {index: row for row, index in enumerate(batch.batch_indices.tolist())}
    indices = steps_of(order)[0].columns["batch_indices"].tolist()
    return [share_of(batch, rows[index]) for index in indices]


def relay(connection: Connection, order: Order) -> None:
    """Run a processor until its worker and its client have left."""
    asyncio.run(_relay(connection, settings_of(order, **_MANY)))


async def _relay(connection: Connection, settings: Settings) -> None:
    async with Processor(settings) as processor:
        connection.send((processor.workers_address, processor.clients_address))
        while not processor.intake.steps or processor.clients.sessions:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(_LOOK_SECONDS)
        await _worker_left(processor)


def receive_remote(_connection: Connection, order: Order) -> Received:
    """Ask for the requests as a client, and note when each step is with all of them."""
    return asyncio.run(_receive_remote(order, settings_of(order, **_MANY)))


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
