"""A system of so many workers, processors and readers, each a process, and what passes through it a second."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import NamedTuple

from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.gateway import BASE, MODES, metrics_of, start_gateway
from benchmarks.http_clients import keep_asking
from benchmarks.processes import PATIENCE, Child, below, deployed, processor_seconds, until_workers
from tests.integration.deployment import Deployment
from tests.support.nats import NatsServer
from tests.support.settings import settings_of
from tokenbus_services.client import Client, RequestEnd, StepRows, Stream
from tokenbus_services.settings import Settings

ZEROMQ, NATS = "zeromq", "nats"
CLIENTS, GATEWAY = "clients", "gateway"
ROWS = 256
"""How many requests each worker has: a step's rows."""
TOKENS_A_ROW = 3
_SETTLE_SECONDS = 1.0
_MOST_TOKENS = 100_000_000
_GATEWAY_TOKENS = 1_000_000
_SETTINGS = {
    # A reader that is a little slower than another is not to lose its requests for that while it is measured.
    "clients__send_queue_bytes": 1 << 31,
    "clients__buffer_bytes": 1 << 32,
    "processor__pending_items": 1 << 20,
    "processor__pending_bytes": 1 << 32,
    # Enough for all credit, and what clients have not acknowledged: more is filled while it is measured, for seconds.
    "worker__retention_items": 512,
    "gateway__address": "127.0.0.1:0",
    "gateway__max_requests": 4096,
}
Rows = list[tuple[float, float]]
"""How many rows each reader had, and when."""


class Way(NamedTuple):
    """What the messages pass through, and who reads: clients, each a process, or the processes of one gateway."""

    bus: str
    reading: str
    pace: int = 0
    """Steps a second of each worker; 0: as many as it can, which clients hold back, but a gateway does not."""


class Shape(NamedTuple):
    """How many of each there are."""

    workers: int
    processors: int
    readers: int

    @property
    def counts(self) -> dict[str, int]:
        return {"worker": self.workers, "processor": self.processors, "reader": self.readers}


class Sample(NamedTuple):
    """What was seen."""

    steps: float
    """Steps of 256 rows a second, with the readers."""
    costs: dict[str, float]
    """Processor microseconds that a step of 256 rows takes in all processes of a kind."""
    busiest: dict[str, float]
    """How much of a core the busiest process of each kind took."""


class _System(NamedTuple):
    pids: dict[str, list[int]]
    """The processes of each kind."""
    rows: Callable[[], Rows]


def sample(way: Way, shape: Shape, top_logprobs: int | None, seconds: float) -> Sample:
    """Start a system, let it run, and measure it for so long."""
    with ExitStack() as stack:
        system = _started(stack, way, shape, top_logprobs)
        time.sleep(_SETTLE_SECONDS)
        before, used, began = system.rows(), _used(system.pids), time.monotonic()
        time.sleep(seconds)
        while (count := _count(after := system.rows()) - _count(before)) <= 0 and time.monotonic() < began + PATIENCE:
            time.sleep(seconds)  # on a busy machine all may stand still for a while
        spent, ended = _used(system.pids), time.monotonic()
    if not count:
        raise WrongDeliveryError(f"{shape}: nothing came for {seconds} s")
    rate = sum((late[0] - early[0]) / (late[1] - early[1]) for early, late in zip(before, after, strict=True)) / ROWS
    taken = {kind: [late - early for early, late in zip(used[kind], spent[kind], strict=True)] for kind in used}
    costs = {kind: sum(each) / (count / ROWS) * 1e6 for kind, each in taken.items()}
    return Sample(rate, costs, {kind: max(each) / (ended - began) for kind, each in taken.items()})


def _started(stack: ExitStack, way: Way, shape: Shape, top_logprobs: int | None) -> _System:
    deployment = stack.enter_context(deployed(**_SETTINGS))
    at, pids = f"ipc://{deployment.folder}/", {}
    if way.bus == NATS:
        server = NatsServer(deployment.folder)
        stack.callback(server.kill)
        at, pids["nats"] = server.address(""), [server.process.pid]
    # Each worker at a processor of its own, in turn: by their names alone a few may all go to the same one.
    processors = [
        deployment.start_processor(bus__workers_address=f"{at}w{place}", bus__clients_address=f"{at}c{place}").pid
        for place in range(shape.processors)
    ]
    all_workers, all_clients = (",".join(f"{at}{kind}{place}" for place in range(shape.processors)) for kind in "wc")
    deployment.overrides |= {"bus.workers_address": all_workers, "bus.clients_address": all_clients}
    pids["worker"] = [
        deployment.start_worker(
            f"w{number}", "--steps-per-second", str(way.pace), bus__workers_address=f"{at}w{number % shape.processors}"
        ).pid
        for number in range(shape.workers)
    ]
    pids["processor"] = processors
    if way.reading == GATEWAY:
        return _read_by_gateway(stack, deployment, shape, top_logprobs, pids)
    readers = [stack.enter_context(Child()) for _ in range(shape.readers)]
    for reader in readers:
        share = ROWS * shape.workers // shape.readers
        reader.begin(read, deployment.overrides, shape.workers, share, top_logprobs)
    for reader in readers:
        reader.answer()
    return _System(pids | {"reader": [each.pid for each in readers]}, lambda: [each.ask("rows") for each in readers])


def _read_by_gateway(
    stack: ExitStack, deployment: Deployment, shape: Shape, top_logprobs: int | None, pids: Mapping[str, list[int]]
) -> _System:
    """Let clients of a gateway keep a request open for each row."""
    gateway, address = start_gateway(deployment, shape.readers)
    request = MODES[BASE] | {"prompt": [1], "max_tokens": _GATEWAY_TOKENS}
    request |= {} if top_logprobs is None else {"logprobs": top_logprobs}
    loads = [stack.enter_context(Child()) for _ in range(shape.workers)]
    for load in loads:
        load.begin(keep_asking, address, "/v1/completions", request, ROWS)
    wanted, end = ROWS * shape.workers, time.monotonic() + PATIENCE
    begun = 0.0
    while begun < wanted:  # while few have begun steps are small, and many
        if time.monotonic() > end:
            raise NotRunError(f"not run: {begun:,.0f} of {wanted} requests began within {PATIENCE:g} s")
        time.sleep(0.2)
        found = metrics_of(address)
        begun = min(found["tokenbus_gateway_open_requests"], found["tokenbus_gateway_first_token_seconds_count"])

    def rows() -> Rows:
        found = metrics_of(address)
        return [(found["tokenbus_gateway_tokens_total"] / TOKENS_A_ROW, found["at"])]

    return _System({**pids, "reader": list(below(gateway.pid)), "load": [each.pid for each in loads]}, rows)


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
                seen.update(output.target.request_keys.tolist())

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


def _count(rows: Rows) -> float:
    return sum(count for count, _ in rows)


def _used(pids: dict[str, list[int]]) -> dict[str, list[float]]:
    return {kind: [processor_seconds(pid) for pid in each] for kind, each in pids.items()}
