"""Worker: an engine and a publisher on the test's event loop."""

import asyncio
from contextlib import AsyncExitStack
from math import inf

from tokenbus.settings import Settings
from tokenbus.testing.clock import ManualClock
from tokenbus.testing.line import Line
from tokenbus.worker import Engine, EngineBrokenError, NotRunningError
from tokenbus.worker.engine_loop import EngineLoop
from tokenbus.worker.run import engine_publisher

_IDLE_SECONDS = 0.1
_FULL = {"block": 0.5, "shed": 0.9}
"""By retention policy, the fill level at which the worker stops computing, because blocking would stop the test."""


class Worker:
    """A worker of a bus in a test, which computes steps on the event loop."""

    def __init__(self, engine: Engine, settings: Settings, line: Line, clock: ManualClock) -> None:
        self.id = settings.worker.id
        self.engine = engine
        self.line = line
        """The connection to the processor."""
        self.step_seconds = 0.0
        """The duration of a step on the test's clock, which the test may change at any time."""
        self.failure: Exception | None = None
        """The exception of the engine that stopped the worker: an EngineBrokenError or a defect."""
        self.defect: Exception | None = None
        """The exception of a defective engine, which the bus raises once in the test."""
        self.steps = 0
        """Number of computed steps."""
        self._settings = settings
        self._clock = clock
        self._came = asyncio.Event()
        self._never = asyncio.Event()
        self._stack = AsyncExitStack()
        self._running: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the worker is running."""
        return self._running is not None

    async def start(self) -> None:
        """Connect to the processor and run the engine."""
        publisher = engine_publisher(self.engine, self._settings, self.line, self._clock)
        self.publisher = await self._stack.enter_async_context(publisher.publisher)
        self.publisher.incoming.on_arrival = self._came.set
        self._loop = EngineLoop(self.engine, publisher, unix_ms=self._clock.unix_ms)
        self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while True:
                if not self.engine.has_work and not await self._clock.wait(self._came, _IDLE_SECONDS):
                    self._loop.turn()  # process requests even if the engine is paused
                    continue
                self._came.clear()
                if self.step_seconds:
                    await self._clock.wait(self._never, self.step_seconds)
                await self._wait_for_room()
                await self.line.flows()
                self.steps += 1
                self._loop.turn()
                await asyncio.sleep(0)
        except NotRunningError:
            return
        except Exception as error:  # noqa: BLE001 - the test gets the error
            self.failure = error
            self.defect = None if isinstance(error, EngineBrokenError) else error
            self.publisher.take_no_more()
            while len(self.publisher.retention):
                await self._progress()
            await self._stack.aclose()

    async def _wait_for_room(self) -> None:
        full = _FULL.get(self._settings.worker.policy, inf)
        while self.publisher.retention.share_used() >= full:
            await self._progress()

    async def _progress(self) -> None:
        self.publisher.link.progress.clear()
        await self.publisher.link.progress.wait()

    async def stop(self) -> None:
        """End the worker with a goodbye, like SIGTERM without time to drain."""
        await self._end(None)

    async def lose(self) -> None:
        """End the worker without a goodbye, like SIGKILL. Unsent items are lost."""
        self.line.is_dead = True
        await self._end(ConnectionAbortedError("the worker was lost"))

    async def halt(self) -> None:
        """Stop computing steps, but stay connected."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def _end(self, error: Exception | None) -> None:
        if self._running is None:
            return
        await self.halt()
        self._running = None
        await self._stack.__aexit__(type(error) if error else None, error, None)
        self.engine.close()
