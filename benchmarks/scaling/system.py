"""A system of so many workers, processors and readers, each a process, and what passes through it a second."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.gateway.measure import metrics_of
from benchmarks.gateway.modes import BASE, MODES
from benchmarks.gateway.system import Load, listening_at, until_ready
from benchmarks.nats_servers import address_of, nats_servers
from benchmarks.processes import below, processor_seconds
from benchmarks.programs import PATIENCE, tokenbus

ZEROMQ, NATS = "zeromq", "nats"
CLIENTS, GATEWAY = "clients", "gateway"
ROWS = 256
"""How many requests each worker has: a step's rows."""
_ROOT = Path(__file__).resolve().parents[2]
_SETTLE_SECONDS = 1.0
_LOOK_SECONDS = 0.2
_LAST_CHARACTERS = 2000
_MOST_TOKENS = 1_000_000
_TOKENS_A_ROW = 3
_SETTINGS = {
    # A reader that is a little slower than another is not to lose its requests for that while it is measured.
    "CLIENTS_SEND_QUEUE_FRAMES": str(1 << 20),
    "CLIENTS_SEND_QUEUE_BYTES": str(1 << 31),
    "CLIENTS_BUFFER_BYTES": str(1 << 32),
    "PROCESSOR_PENDING_ITEMS": str(1 << 20),
    "PROCESSOR_PENDING_BYTES": str(1 << 32),
    # Enough for all credit, and what clients have not acknowledged: more is filled while it is measured, for seconds.
    "WORKER_RETENTION_ITEMS": "512",
    "GATEWAY_ADDRESS": "127.0.0.1:0",
    "GATEWAY_MAX_REQUESTS": "4096",
    "METRICS_ADDRESS": "",
    "LOG_FORMAT": "json",
}


@dataclass(frozen=True, slots=True)
class Way:
    """What the messages pass through, and who reads: clients, each a process, or the processes of one gateway."""

    bus: str
    reading: str
    pace: int = 0
    """Steps a second of each worker; 0: as many as it can, which clients hold back, but a gateway does not."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How many of each there are."""

    workers: int
    processors: int
    readers: int

    @property
    def in_words(self) -> str:
        """The same for people."""
        return f"{self.workers} worker(s), {self.processors} processor(s), {self.readers} reader(s)"


class Sample(NamedTuple):
    """What was seen."""

    steps: float
    """Steps of 256 rows a second, with the readers."""
    costs: dict[str, float]
    """Processor microseconds that a step of 256 rows takes in all processes of a kind."""
    busiest: dict[str, float]
    """How much of a core the busiest process of each kind took."""


class _System(NamedTuple):
    """What runs: the processes of each kind, and what tells how many rows its readers had, and when."""

    pids: dict[str, list[int]]
    counts: Callable[[], list[tuple[float, float]]]


def sample(way: Way, shape: Shape, top_logprobs: int | None, seconds: float, folder: Path) -> Sample:
    """Start a system, let it run, and measure it for so long."""
    with ExitStack() as stack:
        system = _started(stack, way, shape, top_logprobs, folder)
        time.sleep(_SETTLE_SECONDS)
        before, used, began = system.counts(), _used(system.pids), time.monotonic()
        time.sleep(seconds)
        while _rows(after := system.counts()) == _rows(before) and time.monotonic() < began + PATIENCE:
            time.sleep(seconds)  # on a busy machine all may stand still for a while
        spent, ended = _used(system.pids), time.monotonic()
    pairs = list(zip(before, after, strict=True))
    rate = sum((late[0] - early[0]) / (late[1] - early[1]) for early, late in pairs) / ROWS
    if not rate:
        raise WrongDeliveryError(f"{shape.in_words}: nothing came for {seconds} s")
    steps = sum(late[0] - early[0] for early, late in pairs) / ROWS
    taken = {kind: [late - early for early, late in zip(used[kind], spent[kind], strict=True)] for kind in used}
    costs = {kind: sum(taken[kind]) / steps * 1e6 for kind in taken}
    return Sample(rate, costs, {kind: max(taken[kind]) / (ended - began) for kind in taken})


def _started(stack: ExitStack, way: Way, shape: Shape, top_logprobs: int | None, folder: Path) -> _System:
    servers = stack.enter_context(nats_servers(folder, 1)) if way.bus == NATS else []
    at = f"{address_of(servers)}/" if servers else f"ipc://{folder}/"
    log = folder / "log"

    def start(command: Sequence[str], workers: str, clients: str) -> "subprocess.Popen[str]":
        given = _SETTINGS | {"BUS_WORKERS_ADDRESS": workers, "BUS_CLIENTS_ADDRESS": clients}
        given |= {"DEAD_LETTERS_DIRECTORY": f"{folder}/dead"}
        environment = os.environ | {f"TOKENBUS_{name}": value for name, value in given.items()}
        return stack.enter_context(running(command, environment, log))

    # Each worker at a processor of its own, in turn: by their names alone a few may all go to the same one.
    program, places = tokenbus(), range(shape.processors)
    all_workers, all_clients = (",".join(f"{at}{kind}{place}" for place in places) for kind in "wc")
    processors = [start([*program, "processor"], f"{at}w{place}", f"{at}c{place}") for place in places]
    workers = [
        start(
            [*program, "worker", "--engine", "synthetic", "--id", f"w{number}", "--steps-per-second", str(way.pace)],
            f"{at}w{number % shape.processors}",
            all_clients,
        )
        for number in range(shape.workers)
    ]
    pids = {"worker": [each.pid for each in workers], "processor": [each.pid for each in processors]}
    if servers:
        pids["nats"] = [each.process.pid for each in servers]
    if way.reading == GATEWAY:
        gateway = start([*program, "gateway", "--processes", str(shape.readers)], all_workers, all_clients)
        loads, counts = _asking(stack, shape.workers, top_logprobs, log, gateway)
        return _System(pids | {"reader": list(below(gateway.pid)), "load": loads}, counts)
    share = ROWS * shape.workers // shape.readers
    given = [str(shape.workers), str(share), str(top_logprobs).lower()]
    reading = [sys.executable, "-m", "benchmarks.scaling.reader", *given]
    readers = [start(reading, all_workers, all_clients) for _ in range(shape.readers)]
    _wait_for(readers, log)
    return _System(pids | {"reader": [each.pid for each in readers]}, lambda: [_told(each) for each in readers])


def _asking(
    stack: ExitStack, workers: int, top_logprobs: int | None, log: Path, gateway: "subprocess.Popen[str]"
) -> tuple[list[int], Callable[[], list[tuple[float, float]]]]:
    """Let clients of a gateway keep a request open for each row; return their processes, and what counts its rows."""
    address = listening_at(log, gateway)
    until_ready(address, gateway)
    request = MODES[BASE] | {"prompt": [1], "max_tokens": _MOST_TOKENS}
    request |= {} if top_logprobs is None else {"logprobs": top_logprobs}
    loads = []
    for _ in range(workers):
        loads.append(Load(address))
        stack.callback(loads[-1].close)
        loads[-1].ask(request)

    rows = ROWS * workers
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:  # while few have begun steps are small, and many
        found = metrics_of(address)
        if min(found["tokenbus_gateway_open_requests"], found["tokenbus_gateway_first_token_seconds_count"]) >= rows:
            break
        time.sleep(_LOOK_SECONDS)
    else:
        begun = found["tokenbus_gateway_open_requests"]
        raise NotRunError(f"not run: {begun:,.0f} of {rows} requests began within {PATIENCE:g} s")

    def counts() -> list[tuple[float, float]]:
        """Return how many rows the gateway has had, and when."""
        found = metrics_of(address)
        return [(found["tokenbus_gateway_tokens_total"] / _TOKENS_A_ROW, found["at"])]

    return [each.pid for each in loads], counts


@contextmanager
def running(command: Sequence[str], environment: dict[str, str], log: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start a process whose standard error goes to a log; it is killed at the end."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=PATIENCE)


def _wait_for(readers: Sequence["subprocess.Popen[str]"], log: Path) -> None:
    for reader in readers:
        line = reader.stdout.readline() if reader.stdout is not None else ""
        if line != "ready\n":
            raise NotRunError(
                f"not run: a reader did not get its tokens; the log ends with:\n{log.read_text()[-_LAST_CHARACTERS:]}"
            )


def _told(reader: "subprocess.Popen[str]") -> tuple[float, float]:
    """Return how many rows a reader has had, and when."""
    if reader.stdin is None or reader.stdout is None:
        raise RuntimeError("a reader has no pipes")
    reader.stdin.write("count\n")
    reader.stdin.flush()
    found = json.loads(reader.stdout.readline())
    if found["ends"]:
        raise WrongDeliveryError("requests ended that were to go on")
    return found["rows"], found["at"]


def _rows(counts: Sequence[tuple[float, float]]) -> float:
    return sum(rows for rows, _ in counts)


def _used(pids: dict[str, list[int]]) -> dict[str, list[float]]:
    """Return the processor seconds of each process so far, by kind."""
    return {kind: [processor_seconds(pid) for pid in each] for kind, each in pids.items()}
