"""A system of so many workers, processors and readers, each a process, and what passes through it a second."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import NamedTuple

from benchmarks.errors import WrongDeliveryError
from benchmarks.processes import PATIENCE, Child, deployed, processor_seconds, until_workers
from tests.support.settings import settings_of
from tokenbus.client import Client, RequestEnd, StepRows, Stream
from tokenbus.settings import Settings

ROWS = 256
"""How many requests each worker has: a step's rows."""
_SETTLE_SECONDS = 1.0
_MOST_TOKENS = 100_000_000
_SETTINGS = {
    # A reader that is a little slower than another is not to lose its requests for that while it is measured.
    "clients__send_queue_bytes": 1 << 31,
    "clients__buffer_bytes": 1 << 32,
    "processor__pending_items": 1 << 20,
    "processor__pending_bytes": 1 << 32,
    # Enough for all credit, and what clients have not acknowledged: more is filled while it is measured, for seconds.
    "worker__retention_items": 512,
}


class Shape(NamedTuple):
    """How many of each there are."""

    worker: int
    processor: int
    reader: int


class Sample(NamedTuple):
    """What was seen."""

    steps: float
    """Steps of 256 rows a second, with the readers."""
    costs: dict[str, float]
    """Processor microseconds that a step of 256 rows takes in all processes of a kind."""
    busiest: dict[str, float]
    """How much of a core the busiest process of each kind took."""


def sample(shape: Shape, top_logprobs: int | None, seconds: float) -> Sample:
    """Start a system, let it run, and measure it for so long."""
    with ExitStack() as stack:
        pids, readers = _started(stack, shape, top_logprobs)
        time.sleep(_SETTLE_SECONDS)
        before, used, began = _rows(readers), _used(pids), time.monotonic()
        time.sleep(seconds)
        while (count := _count(after := _rows(readers)) - _count(before)) <= 0 and time.monotonic() < began + PATIENCE:
            time.sleep(seconds)  # on a busy machine all may stand still for a while
        spent, ended = _used(pids), time.monotonic()
    if not count:
        raise WrongDeliveryError(f"{shape}: nothing came for {seconds} s")
    rate = sum((late[0] - early[0]) / (late[1] - early[1]) for early, late in zip(before, after, strict=True)) / ROWS
    taken = {kind: [late - early for early, late in zip(used[kind], spent[kind], strict=True)] for kind in used}
    costs = {kind: sum(each) / (count / ROWS) * 1e6 for kind, each in taken.items()}
    return Sample(rate, costs, {kind: max(each) / (ended - began) for kind, each in taken.items()})


def _started(stack: ExitStack, shape: Shape, top_logprobs: int | None) -> tuple[dict[str, list[int]], list[Child]]:
    """Return the processes of each kind, and the readers among them."""
    deployment = stack.enter_context(deployed(**_SETTINGS))
    at = f"ipc://{deployment.folder}/"
    # Each worker at a processor of its own, in turn: by their names alone a few may all go to the same one.
    processors = [
        deployment.start_processor(bus__workers_address=f"{at}w{place}", bus__clients_address=f"{at}c{place}").pid
        for place in range(shape.processor)
    ]
    all_workers, all_clients = (",".join(f"{at}{kind}{place}" for place in range(shape.processor)) for kind in "wc")
    deployment.overrides |= {"bus.workers_address": all_workers, "bus.clients_address": all_clients}
    workers = [
        deployment.start_worker(
            f"w{number}", "--steps-per-second", "0", bus__workers_address=f"{at}w{number % shape.processor}"
        ).pid
        for number in range(shape.worker)
    ]
    readers = [stack.enter_context(Child()) for _ in range(shape.reader)]
    for reader in readers:
        reader.begin(read, deployment.overrides, shape.worker, ROWS * shape.worker // shape.reader, top_logprobs)
    for reader in readers:
        reader.answer()
    return {"worker": workers, "processor": processors, "reader": [each.pid for each in readers]}, readers


def read(
    connection: Connection, overrides: Mapping[str, object], workers: int, requests: int, top_logprobs: int | None
) -> None:
    """Keep requests open, and answer each message with the rows that came so far, and when."""
    asyncio.run(_read(connection, settings_of(overrides), workers, requests, top_logprobs))


async def _read(
    connection: Connection, settings: Settings, workers: int, requests: int, top_logprobs: int | None
) -> None:
    rows, seen = 0, set[int]()

    async def count(steps: Stream[StepRows | RequestEnd]) -> None:
        nonlocal rows
        async for output in steps:
            if isinstance(output, RequestEnd):
                raise WrongDeliveryError(f"a request ended: {output.error}")
            rows += output.target.row_count
            if len(seen) < requests:
                seen.update(output.target.request_ids.tolist())

    async with Client(settings) as client, client.steps(most=1024) as steps, asyncio.TaskGroup() as group:
        await until_workers(client, workers)
        for _ in range(requests):
            client.submit([1], max_tokens=_MOST_TOKENS, top_logprobs=top_logprobs)
        group.create_task(count(steps))
        while len(seen) < requests:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.05)
        connection.send("ready")
        while await asyncio.to_thread(connection.recv):
            connection.send((rows, time.monotonic()))


def _rows(readers: list[Child]) -> list[tuple[float, float]]:
    """Return how many rows each reader had, and when."""
    return [each.ask("rows") for each in readers]


def _count(rows: list[tuple[float, float]]) -> float:
    return sum(count for count, _ in rows)


def _used(pids: dict[str, list[int]]) -> dict[str, list[float]]:
    return {kind: [processor_seconds(pid) for pid in each] for kind, each in pids.items()}
