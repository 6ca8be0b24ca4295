"""Measure what a step costs a processor, by its readers: `python -m benchmarks.processor`.

A worker publishes steps of 256 rows at a pace, in batch order, as vLLM's are. Readers, each a client in a process of
its own, have equal shares of the rows, scattered over the step. What is measured is `process_time` in the processor,
with libzmq's thread and all that time alone demands.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from multiprocessing.connection import Connection
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks.bus.pair import Order
from benchmarks.bus.tokenbus import settings_of
from benchmarks.errors import WrongDeliveryError
from benchmarks.processes import Child, answers_of, until_workers
from benchmarks.report import Report, Row, progress
from benchmarks.workload import HEADLINE_ROWS, VOCABULARY_SIZE, Case
from tokenbus_contracts import BatchHeader, LogprobBatch, RowStatus, Scoring, ValueKind
from tokenbus_services.client import Client, RequestEnd
from tokenbus_services.processor import Processor
from tokenbus_services.settings import Settings
from tokenbus_services.worker import Publisher

_READERS = (1, 2, 4, 8)
_TOP_KS = (None, 0, 20)
_SETTLE_SECONDS = 0.5
_WAIT_SECONDS = 0.1
_MANY = {"clients__send_queue_bytes": 1 << 29, "processor__pending_items": 1 << 12}
"""A busy machine that lets a reader stand still is not to end its requests."""


class Spent(NamedTuple):
    """What a processor has done since it began."""

    steps: int
    process_ns: int
    thread_ns: int
    """Of its event loop's thread."""


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("processor", __doc__)
    add = report.parser.add_argument
    add("--rounds", type=int, default=3, metavar="N", help="how many rounds (3)")
    add("--seconds", type=float, default=3.0, metavar="S", help="how long each is measured (3)")
    add("--rate", type=float, default=200.0, metavar="N", help="steps a second (200)")
    add("--tokens", type=int, default=1, metavar="N", help="tokens of each row (1)")
    add("--readers", type=int, nargs="+", default=_READERS, metavar="N", help="how many read, in turn (1 2 4 8)")
    options = report.parse(arguments)
    if options.quick:
        options.rounds, options.seconds, options.readers = 1, 0.3, (1, 2)
    report.say(f"{options.rounds} round(s) of {options.seconds:g} s in turn, medians, {options.rate:g} steps/s.")
    cells = list(product(_TOP_KS, options.readers))
    found: dict[tuple[int | None, int], list[tuple[float, float]]] = {cell: [] for cell in cells}
    with ExitStack() as stack:
        worker, processor, *readers = (stack.enter_context(Child()) for _ in range(2 + max(options.readers)))
        for number in range(options.rounds):
            for top_k, count in cells if number % 2 == 0 else reversed(cells):
                progress(f"round {number + 1} of {options.rounds}: {count} reader(s), k = {_name(top_k)}")
                order = Order(case=Case(HEADLINE_ROWS, options.tokens, top_k), rate=options.rate)
                found[top_k, count].append(_measured(worker, processor, readers[:count], order, options.seconds))
    report.table([_row(cell, found, options.tokens) for cell in cells])
    report.write()


def _row(
    cell: tuple[int | None, int], found: dict[tuple[int | None, int], list[tuple[float, float]]], tokens: int
) -> Row:
    top_k, readers = cell
    process, thread = (median(values) for values in zip(*found[cell], strict=True))
    alone = found.get((top_k, 1))
    return {
        "k": _name(top_k),
        "readers": readers,
        "us a step": process,
        "of these its event loop": thread,
        "us a token": process / HEADLINE_ROWS / tokens,
        "times one reader": process / median(each for each, _ in alone) if alone else None,
    }


def _name(top_k: int | None) -> str:
    return "none" if top_k is None else str(top_k)


def _measured(
    worker: Child, processor: Child, readers: Sequence[Child], order: Order, seconds: float
) -> tuple[float, float]:
    """Return the microseconds of a step in the processor, and those of its event loop's thread."""
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        order = order._replace(address=f"ipc://{folder}/w", clients_address=f"ipc://{folder}/c")
        processor.begin(process, order)
        processor.answer()  # it listens
        worker.begin(publish, order)
        for reader in readers:
            reader.begin(read, order, HEADLINE_ROWS // len(readers))
        for reader in readers:
            reader.answer()  # it has had rows of all its requests
        time.sleep(_SETTLE_SECONDS)
        before = processor.ask("spent")
        time.sleep(seconds)
        spent = processor.ask("spent")
        worker.send("end")
        answers_of(worker, *readers)
        processor.ask("end")
    steps = spent.steps - before.steps
    if not steps:
        raise WrongDeliveryError(f"no step came for {seconds} s")
    return (spent.process_ns - before.process_ns) / steps / 1e3, (spent.thread_ns - before.thread_ns) / steps / 1e3


# What the processes do.


def process(connection: Connection, order: Order) -> None:
    """Run a processor, and answer each message but the last with what it has spent."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_process(connection, settings_of(order, folder, processor__drain_timeout_ms=0, **_MANY)))


async def _process(connection: Connection, settings: Settings) -> None:
    loop, asked = asyncio.get_running_loop(), asyncio.Queue[str]()
    async with Processor(settings) as processor:
        loop.add_reader(connection.fileno(), lambda: asked.put_nowait(connection.recv()))
        connection.send("listening")
        while await asked.get() != "end":
            connection.send(Spent(processor.intake.steps, time.process_time_ns(), time.thread_time_ns()))
        loop.remove_reader(connection.fileno())


def publish(connection: Connection, order: Order) -> None:
    """Take requests, and publish a step for them all at a pace until told to end them."""
    rows, tokens = order.case.rows, order.case.tokens_per_row
    with tempfile.TemporaryDirectory() as folder, Publisher(settings_of(order, folder, **_MANY)) as publisher:
        keys: list[int] = []
        while len(keys) < rows:
            keys += [request.request_key for request in publisher.take_requests(_WAIT_SECONDS)]
        random.Random(order.seed).shuffle(keys)  # noqa: S311 - no secret
        for key in keys:
            publisher.admitted(key, 1)
        columns = _columns(order.case) | {"request_keys": np.array(keys, np.uint64)}
        begin, step, is_last = time.monotonic(), 0, False
        while not is_last:
            is_last = connection.poll(max(0.0, begin + step / order.rate - time.monotonic()))
            status = RowStatus.FINISHED_LENGTH if is_last else RowStatus.ACTIVE
            columns["statuses"] = np.full(rows, status, np.uint8)
            columns["positions"] = np.full(rows, step * tokens, np.uint32)
            step += 1
            header = BatchHeader(
                "", 0, 0, step, rows, value_kind=ValueKind.RAW_LOGPROBS, vocabulary_size=VOCABULARY_SIZE
            )
            publisher.publish(LogprobBatch(header, **columns))
        connection.recv()


def _columns(case: Case) -> dict[str, np.ndarray]:
    """Return the columns that all steps share."""
    values, top_k, is_scored = np.random.default_rng(1), case.top_k or 0, case.top_k is not None
    lines = -np.cumsum(values.uniform(0.01, 1.0, (case.tokens, max(1, top_k))), axis=1).astype("f4")
    ids = values.integers(0, VOCABULARY_SIZE - max(1, top_k), (case.tokens, 1), "u4") + np.arange(
        max(1, top_k), dtype="u4"
    )
    bytes_of = {
        "token_counts": case.tokens_per_row,
        "draft_token_counts": 0,
        "proposal_counts": 0,
        "scorings": Scoring.FULL if is_scored else Scoring.NONE,
        "top_ks": top_k,
    }
    shared = {
        "batch_indices": np.arange(case.rows, dtype="u4"),
        **{name: np.full(case.rows, value, "u1") for name, value in bytes_of.items()},
        "token_ids": ids[:, 0].copy(),
    }
    scores = {"logprobs": lines[:, 0].copy(), "ranks": np.ones(case.tokens, "u4")}
    wide = {"alternative_token_ids": ids.reshape(-1), "alternative_logprobs": lines.reshape(-1)}
    return shared | (scores if is_scored else {}) | (wide if top_k else {})


def read(connection: Connection, order: Order, requests: int) -> None:
    """Ask for so many requests, and take their rows as columns until all have ended."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_read(connection, settings_of(order, folder), requests))


async def _read(connection: Connection, settings: Settings, requests: int) -> None:
    open_ids, seen, is_ready = set[int](), set[int](), False
    async with Client(settings) as client, client.steps(most=1024) as steps:
        await until_workers(client, 1)
        open_ids.update(client.submit([1], max_tokens=1 << 30) for _ in range(requests))
        while open_ids:
            output = await anext(steps)
            if isinstance(output, RequestEnd):
                if output.error is not None:
                    raise WrongDeliveryError(f"a request ended: {output.error}")
                open_ids.remove(output.request_id)
            elif not is_ready:
                seen.update(output.target.request_keys.tolist())
                if is_ready := seen == open_ids:
                    connection.send("ready")


if __name__ == "__main__":
    main()
