"""A bus in a test, with processors, workers, clients and the real protocol on the test's event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Literal, TypeVar

from tokenbus.bus import memory
from tokenbus.client import Client
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.processor import Processor
from tokenbus.settings import Settings
from tokenbus.testing.clock import ManualClock
from tokenbus.testing.line import Line
from tokenbus.testing.worker import Worker
from tokenbus.worker.engine import Engine, engine_of, is_engine

_QUIET_TURNS = 30
"""Number of turns of the event loop without messages and steps after which the bus counts as idle."""
_MOST_TURNS = 500
_MOST_TURNS_A_TICK = 100
"""Maximum number of turns of the event loop before the clock moves again."""
_TICKS = 10
"""Number of clock steps per heartbeat interval. Longer steps would look like a stalled process."""
_numbers = count(1)
T = TypeVar("T")


@asynccontextmanager
async def bus(
    engine: Engine | Callable[[], Engine] | None = None,
    *,
    workers: int = 1,
    processors: int = 1,
    step_seconds: float = 0.0,
    settings: Mapping[str, object] | None = None,
) -> AsyncIterator["Bus"]:
    """Run a bus within an `async with` block, without ports, processes or threads. The test controls the time.

    Args:
        engine: the engine, or a function that creates one for each worker, by default a `SyntheticEngine`, whose output
        `true_tokens` predicts. workers: the initial number of workers. processors: the number of processors; clients
        connect to all of them. step_seconds: the duration of a step on the bus's clock, which `Worker.step_seconds` can
        change. settings: settings by key, such as `{"worker.max_requests": 8}`. All other settings have defaults, and
        the environment is ignored.

    Yields:
        the `Bus`, after the client and the workers have connected.

    Raises:
        SettingsError: a setting cannot be used. ValueError: several workers got one engine, or `processors` is 0.

    Example:
        async with tokenbus.testing.bus() as bus:
            tokens = [token.id async for token in bus.client.generate([1, 2, 3], max_tokens=4)]
        assert len(tokens) == 4
    """
    if workers > 1 and is_engine(engine):
        raise ValueError(f"engine: a function that creates engines, for {workers} workers, got an engine")
    if processors < 1:
        raise ValueError(f"processors: at least 1, got {processors}")
    made = Bus(_settings(settings or {}), processors, step_seconds)
    try:
        await made.start()
        for _ in range(workers):
            await made.add_worker(engine)
        yield made
    finally:
        await made.close()


def _settings(values: Mapping[str, object]) -> Settings:
    """Return the settings without drain timeouts."""
    loaded = Settings.load(environment={}, overrides={"worker.drain_timeout_ms": 0, "gateway.control": True, **values})
    processor, client = replace(loaded.processor, drain_timeout_ms=0), replace(loaded.client, drain_timeout_ms=0)
    return replace(loaded, processor=processor, client=client)


class Bus:
    """A bus in a test, created by `bus`."""

    client: Client

    def __init__(self, settings: Settings, processors: int, step_seconds: float) -> None:
        name = f"memory://bus-{next(_numbers)}"
        self._places = [(f"{name}.workers-{place}", f"{name}.clients-{place}") for place in range(processors)]
        workers, clients = (",".join(addresses) for addresses in zip(*self._places, strict=True))
        addressed = replace(settings.bus, workers_address=workers, clients_address=clients)
        self._step_seconds = step_seconds
        self.settings = replace(settings, bus=addressed, worker=replace(settings.worker, id="publisher"))
        """The settings for further clients and publishers."""
        self.address = clients
        """The address for `tokenbus.connect` in the code under test."""
        self.clock = ManualClock()
        """The clock of the bus, which `advance` moves."""
        self.processors: list[Processor | None] = [None] * processors
        """The processors by number, with None for a processor that is not running."""
        self.workers: list[Worker] = []
        """The workers in the order of their addition."""
        self._transport = memory.MemoryTransport(self.settings.bus, self.clock)
        self._clients: dict[Client, Line] = {}

    async def start(self) -> None:
        """Start the processors and the first client."""
        memory.SHARED.update((address, self._transport) for place in self._places for address in place)
        for place in range(len(self._places)):
            await self.start_processor(place)
        self.client = await self.add_client()

    async def close(self) -> None:
        """Stop the bus without waiting for open requests."""
        async with AsyncExitStack() as stack:  # stop the rest even after an error
            for address in (each for place in self._places for each in place):
                stack.callback(memory.SHARED.pop, address, None)
            stack.callback(self.clock.run)  # connections that the test left open cannot close while the clock stands
            for place, processor in enumerate(self.processors):
                if processor is not None:
                    stack.push_async_callback(self.lose_processor, place)
            for client in list(self._clients):
                stack.push_async_callback(self.lose_client, client)
            for worker in self.workers:
                stack.push_async_callback(worker.lose)
            for worker in self.workers:
                await worker.halt()
            await self.settle()  # deliver the last acks

    # Workers.

    @property
    def worker(self) -> Worker:
        """The first worker."""
        if not self.workers:
            raise RuntimeError("there is no worker: call add_worker first")
        return self.workers[0]

    async def add_worker(
        self,
        engine: Engine | Callable[[], Engine] | None = None,
        *,
        worker_id: str = "",
        role: Literal["mixed", "prefill", "decode"] = "mixed",
        step_seconds: float | None = None,
    ) -> Worker:
        """Add and connect a worker. In `workers`, a lost worker is replaced by a new worker with the same id.

        Requests go to prefill workers first, if any, and then to decode workers. The engine of a prefill worker must
        stop after the first token, as `SyntheticEngine(role="prefill")` does.
        """
        running = {worker.id for worker in self.workers if worker.is_running}
        if worker_id in running:
            raise ValueError(f"worker_id: {worker_id} is running already")
        number = next(each for each in count() if f"worker-{each}" not in {worker.id for worker in self.workers})
        chosen = replace(self.settings.worker, id=worker_id or f"worker-{number}", role=role)
        settings = replace(self.settings, worker=chosen)
        worker = Worker(engine_of(engine or SyntheticEngine), settings, Line(self._transport), self.clock)
        worker.step_seconds = self._step_seconds if step_seconds is None else step_seconds
        lost = [index for index, each in enumerate(self.workers) if each.id == worker.id]
        if lost:
            self.workers[lost[0]] = worker
        else:
            self.workers.append(worker)
        await worker.start()
        await self.settle()
        return worker

    # Clients.

    async def add_client(self, name: str = "") -> Client:
        line = Line(self._transport)
        settings = self.settings
        if name:
            settings = replace(settings, client=replace(settings.client, name=name))
        client = Client(settings, transport=line, clock=self.clock)
        await client.__aenter__()
        self._clients[client] = line
        await self.settle()
        return client

    def line(self, client: Client) -> Line:
        """Return the connection of a client. `Worker.line` is the connection of a worker."""
        if client not in self._clients:
            raise ValueError("client: not a client of this bus, or lost")
        return self._clients[client]

    async def lose_client(self, client: Client) -> None:
        """End a client without a goodbye, like SIGKILL."""
        line = self.line(client)
        del self._clients[client]
        line.is_dead = True
        over = ConnectionAbortedError("the client was lost")
        ending = asyncio.create_task(client.__aexit__(type(over), over, None))
        while not ending.done():
            await asyncio.sleep(0)
            self.clock.advance(0)
        await ending

    # Processors.

    @property
    def processor(self) -> Processor:
        """The first processor."""
        found = self.processors[0]
        if found is None:
            raise RuntimeError("the processor is not running: call start_processor first")
        return found

    async def start_processor(self, place: int = 0) -> Processor:
        """Start a processor, for example after `lose_processor`."""
        if self.processors[place] is not None:
            raise RuntimeError(f"processor {place} is running already")
        workers, clients = self._places[place]
        addresses = replace(self.settings.bus, workers_address=workers, clients_address=clients)
        own = replace(self.settings.processor, id=f"processor-{place}")
        settings = replace(self.settings, bus=addresses, processor=own)
        processor = Processor(settings, transport=self._transport, clock=self.clock)
        self.processors[place] = await processor.__aenter__()
        return processor

    async def lose_processor(self, place: int = 0) -> None:
        """End a processor without a goodbye, like SIGKILL. The memory of the processor is lost."""
        processor = self.processors[place]
        if processor is None:
            raise RuntimeError(f"processor {place} is not running")
        self.processors[place] = None
        for address in self._places[place]:
            self._transport.crash(address)
        over = ConnectionAbortedError("the processor was lost")
        await processor.__aexit__(type(over), over, None)

    async def restart_processor(self, place: int = 0) -> Processor:
        """Lose and restart a processor. Requests continue."""
        await self.lose_processor(place)
        return await self.start_processor(place)

    # Time.

    async def advance(self, seconds: float) -> None:
        """Move the clock forward in steps, and run the due tasks after each step."""
        end = self.clock.now() + seconds
        await self.settle()
        while (remaining := end - self.clock.now()) > 0:
            self.clock.advance(min(self._tick, remaining))
            await self.settle(_MOST_TURNS_A_TICK)

    async def until(self, awaited: Awaitable[T], seconds: float = 60.0) -> T:
        """Advance the clock until an awaitable is done, and return its result.

        Use this method to wait for timers, because only this method and `advance` move the clock. Raises TimeoutError
        after `seconds` of the bus's time.
        """
        task = asyncio.ensure_future(awaited)
        end = self.clock.now() + seconds
        try:
            while not task.done() and self.clock.now() < end:
                await self.settle()
                if not task.done():
                    await self.advance(self._tick)
            if not task.done():
                raise TimeoutError(f"not done after {seconds} s of the bus's time")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def settle(self, turns: int = _MOST_TURNS) -> None:
        """Run the event loop for at most `turns` until the bus is idle. Raises the exception of a defective engine."""
        quiet = 0
        for _ in range(turns):
            before = self._moved
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._moved == before else 0
            if quiet == _QUIET_TURNS:
                break
        for worker in self.workers:
            defect, worker.defect = worker.defect, None
            if defect is not None:
                raise defect

    @property
    def _tick(self) -> float:
        return self.settings.bus.heartbeat_interval_ms / 1000 / _TICKS

    @property
    def _moved(self) -> int:
        return self._transport.messages + sum(worker.steps for worker in self.workers)
