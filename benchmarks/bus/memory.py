"""Resident memory of the worker, the processor and the client over a long run with requests that come and go."""

import asyncio
import os
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.bus.orders import Order
from benchmarks.bus.pair import Pair
from benchmarks.bus.peers import Tell
from benchmarks.bus.remote import both_left, prompt, relayed_settings
from benchmarks.workload import Case
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_engines.synthetic import SyntheticEngine
from tokenbus_services.client import Client, RequestEnd, StepRows
from tokenbus_services.processor import Processor
from tokenbus_services.settings import Settings
from tokenbus_services.worker import Publisher
from tokenbus_services.worker.emitter import Emitter
from tokenbus_services.worker.engine_loop import EngineLoop

ROWS, TOKENS_A_REQUEST = 4, 64
"""Small, so that a million steps are a matter of minutes: what leaks, leaks with each step or each request."""
_SAMPLES = 200
_WARM = 0.25
"""The share of a run that fills buffers and caches for the first time, and is no part of the slope."""
_ENDED_REQUESTS = 1024
_LAST_KEY = 2**64 - 1
"""Of the request that tells the worker that there are no more."""
_MIB = 2.0**20


class Fit(NamedTuple):
    """How memory goes over steps, after the first quarter."""

    first_mib: float
    last_mib: float
    most_mib: float
    slope_mib: float
    """For a million steps."""
    error_mib: float
    """Its standard error, for samples that depend on those before them."""


class Gauge:
    """Notes the resident memory of this process every so many steps."""

    def __init__(self, steps: int) -> None:
        """Spread the samples over the steps."""
        self._every = max(1, steps // _SAMPLES)
        self.steps = 0
        self.samples: list[tuple[int, int]] = []

    def step(self) -> None:
        """Count a step."""
        self.steps += 1
        if self.steps % self._every == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.samples.append((self.steps, pages * os.sysconf("SC_PAGE_SIZE")))


Samples = list[tuple[int, int]]


def measure_memory(pair: Pair, transport: str, steps: int) -> dict[str, Samples]:
    """Return the samples of each process."""
    order = Order(
        case=Case(ROWS, 1, 0),
        address=pair.address(transport, "workers"),
        clients_address=pair.address(transport, "clients"),
        steps=steps,
    )
    answers = pair.relayed(work, relay, ask, order)
    return dict(zip(("worker", "processor", "client"), answers, strict=True))


def fit(samples: Samples) -> Fit:
    """Return a line through the samples, and how far it is to be trusted."""
    kept = np.array(samples[int(len(samples) * _WARM) :], np.float64)
    steps, mib = kept[:, 0] / 1e6, kept[:, 1] / _MIB
    across = steps - steps.mean()
    spread = float((across**2).sum())
    slope = float((across * mib).sum()) / spread
    rest = mib - mib.mean() - slope * across
    error = (float((rest**2).sum()) / max(1, steps.size - 2) / spread) ** 0.5
    together = float((rest**2).sum())
    again = float((rest[1:] * rest[:-1]).sum()) / together if together else 0.0
    dependence = max(0.0, min(again, 0.99))
    error *= ((1 + dependence) / (1 - dependence)) ** 0.5
    return Fit(*(round(float(value), 3) for value in (mib[0], mib[-1], mib.max(), slope, error)))


class _CountedEngine(SyntheticEngine):
    """Ends its worker when it has done the last request."""

    def __init__(self, order: Order, stop: threading.Event) -> None:
        """Take the order, and what ends the worker."""
        super().__init__(tokens_per_step=1)
        self._stop = stop
        self._is_last = False
        self.gauge = Gauge(order.steps)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        if super().has_work:
            return True
        if self._is_last:
            self._stop.set()
        return False

    def admit(self, generate: Generate, state: bytes | None = None) -> int:
        """Take a request, and return how long its prompt is."""
        self._is_last |= generate.request_key == _LAST_KEY
        return super().admit(generate, state)


def work(order: Order) -> Samples:
    """Publish a synthetic engine's steps."""
    stop = threading.Event()
    engine = _CountedEngine(order, stop)
    with tempfile.TemporaryDirectory() as folder, Publisher(_settings(order, folder)) as publisher:
        EngineLoop(engine, Emitter(publisher, engine.vocabulary_size)).serve(stop, engine.gauge.step)
    return engine.gauge.samples


def relay(order: Order, tell: Tell) -> Samples:
    """Run a processor until its worker and its client have left."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_relay(order, tell, folder))


async def _relay(order: Order, tell: Tell, folder: str) -> Samples:
    gauge = Gauge(order.steps)
    async with Processor(_settings(order, folder)) as processor:
        processor.intake.step_observers.append(lambda _step: gauge.step())
        tell(f"{processor.workers_address} {processor.clients_address}")
        await both_left(processor)
    return gauge.samples


def ask(order: Order) -> Samples:
    """Ask for one short request after the other, as many at once as a step has rows."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_ask(order, folder))


async def _ask(order: Order, folder: str) -> Samples:
    gauge = Gauge(order.steps)

    def came(output: StepRows | RequestEnd) -> None:
        if isinstance(output, StepRows):
            gauge.step()

    async def again_and_again(client: Client) -> None:
        while gauge.steps < order.steps:
            async for _ in client.generate(prompt(TOKENS_A_REQUEST)).rows():
                pass

    async with Client(_settings(order, folder)) as client:
        client.requests.open_stream(came)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(order.case.rows):
                tasks.create_task(again_and_again(client))
        last = prompt(1)
        last.request_key = _LAST_KEY
        async for _ in client.generate(last).rows():
            pass
    return gauge.samples


def _settings(order: Order, folder: str) -> Settings:
    return relayed_settings(order, folder, **{"processor.ended_requests": _ENDED_REQUESTS})
