"""What readers of the log cost its writer: turns with one, two and four of them, each a process of its own."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.durable_log.reader import END
from benchmarks.durable_log.writing import Source, log_settings
from benchmarks.errors import WrongDeliveryError
from benchmarks.nats_servers import NatsServer, address_of
from benchmarks.outputs import Record, progress
from benchmarks.processes import seconds as processor_seconds
from benchmarks.programs import PATIENCE
from tokenbus_services.durable_log.stream import LogStream
from tokenbus_services.durable_log.writer import LogWriter

AGAIN = "1 again"
_BASE = "1"
_READERS = {_BASE: 1, AGAIN: 1, "2": 2, "4": 4}
"""One reader is measured twice: what the second differs by from the first is no cost of readers."""
_GOAL = "2"
_LEAST_RATE, _MOST_COST = 0.97, 1.03
"""What a second reader may leave of the writer's rate, and make of its processor time an item: nothing measurable."""
_FIRST_EPOCH = 1000
"""Above those of what was written beside bare nats-py."""
_ROOT = Path(__file__).resolve().parents[2]


class Turn(NamedTuple):
    """What one turn saw; processor time is in microseconds an item."""

    per_second: float
    writer_us: float
    ack_ms: float
    servers_us: float
    reader_us: float
    """Of one reader, the mean of all."""


async def cost_of_readers(
    servers: Sequence[NatsServer], rounds: int, seconds: float, size: int, paces: Sequence[int]
) -> list[Record]:
    """Return for each pace and number of readers what the writer's rate and costs were."""
    settings = log_settings(servers)
    payloads = [os.urandom(size) for _ in range(16)]
    found: dict[tuple[int, str], list[Turn]] = {(pace, name): [] for pace in paces for name in _READERS}
    epoch = _FIRST_EPOCH
    with _started(address_of(servers, "log")) as readers:
        async with LogWriter(LogStream(settings), settings, drain_seconds=PATIENCE) as writer:
            for number in range(rounds):
                progress(f"readers, {len(servers)} replica(s), round {number + 1} of {rounds}")
                for pace, name in list(found)[:: 1 if number % 2 == 0 else -1]:
                    epoch += 1
                    source = Source(writer, settings, epoch, payloads)
                    turn = _turn(writer, source, epoch, readers[: _READERS[name]], servers, seconds, pace)
                    found[pace, name].append(await turn)
    return [
        _figures(len(servers), pace, name, turns, found[pace, _BASE]) for (pace, name), turns in found.items()
    ]  # fmt: skip


async def _turn(  # noqa: PLR0913, PLR0917 - all that takes part
    writer: LogWriter,
    source: Source,
    epoch: int,
    readers: Sequence["subprocess.Popen[str]"],
    servers: Sequence[NatsServer],
    seconds: float,
    pace: int,
) -> Turn:
    since = time.time()
    for reader in readers:
        _write(reader, f"{epoch} {since}")
    await source.put(b"begin")
    for reader in readers:
        await asyncio.to_thread(_line, reader)
    roots = {"servers": [each.process.pid for each in servers]}
    before, cpu, of_servers = _counted(writer), time.process_time(), processor_seconds(roots)["servers"]
    rate = await source.write(seconds, pace)
    after, spent = _counted(writer), time.process_time() - cpu
    of_servers = processor_seconds(roots)["servers"] - of_servers
    items = source.items
    await source.put(END)
    results = [json.loads(await asyncio.to_thread(_line, reader)) for reader in readers]
    if any(each["items"] != items for each in results):
        raise WrongDeliveryError(f"{items} items were written, readers got {[each['items'] for each in results]}")
    messages, writing = after[0] - before[0], after[1] - before[1]
    of_readers = sum(each["cpu"] for each in results) / len(results)
    micro = 1e6 / (items - 1)
    return Turn(rate, spent * micro, writing / messages * 1e3, of_servers * micro, of_readers * micro)


def _counted(writer: LogWriter) -> tuple[int, float]:
    return writer.counts.messages, writer.counts.write_seconds


def _figures(replicas: int, pace: int, name: str, turns: Sequence[Turn], base: Sequence[Turn]) -> Record:
    pairs = list(zip(turns, base, strict=True))
    medians = {field: round(median(getattr(each, field) for each in turns), 2) for field in Turn._fields}
    return {
        "replicas": replicas,
        "pace": pace,
        "readers": name,
        **medians,
        "rate_of_one": [round(one.per_second / other.per_second, 3) for one, other in pairs],
        "cost_of_one": [round(one.writer_us / other.writer_us, 3) for one, other in pairs],
    }


def goals(figures: Sequence[Record]) -> Iterator[Record]:
    """Yield what a second reader leaves of the rate and makes of the writer's processor time."""
    for each in figures:
        if each["readers"] != _GOAL:
            continue
        replicas, pace = each["replicas"], each["pace"]
        where = f"two readers / one, {replicas} replica(s), {f'{pace} items/s' if pace else 'full speed'}"
        rate, cost = median(each["rate_of_one"]), median(each["cost_of_one"])
        yield {
            "goal": f"items/s of the writer, {where}",
            "wanted": f"at least {_LEAST_RATE}",
            "measured": round(rate, 3),
            "met": rate >= _LEAST_RATE,
        }
        yield {
            "goal": f"its processor time an item, {where}",
            "wanted": f"at most {_MOST_COST}",
            "measured": round(cost, 3),
            "met": cost <= _MOST_COST,
        }


@contextmanager
def _started(address: str) -> Iterator[list["subprocess.Popen[str]"]]:
    command = [sys.executable, "-m", "benchmarks.durable_log.reader", address]
    with ExitStack() as stack:
        readers = []
        for _ in range(max(_READERS.values())):
            pipe = subprocess.PIPE
            reader = stack.enter_context(subprocess.Popen(command, cwd=_ROOT, stdin=pipe, stdout=pipe, text=True))
            stack.callback(reader.kill)
            readers.append(reader)
        yield readers


def _write(reader: "subprocess.Popen[str]", line: str) -> None:
    if reader.stdin is None:
        raise RuntimeError("a reader has no pipes")
    reader.stdin.write(f"{line}\n")
    reader.stdin.flush()


def _line(reader: "subprocess.Popen[str]") -> str:
    line = "" if reader.stdout is None else reader.stdout.readline()
    if not line:
        raise WrongDeliveryError("a reader of the log ended")
    return line
