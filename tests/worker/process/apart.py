"""An engine's side and its publisher's server on one event loop, as if each had a process of its own."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.settings import Settings
from tokenbus.testing import Bus, bus
from tokenbus.testing.line import Line
from tokenbus.worker.engine_loop import EngineLoop
from tokenbus.worker.process.handover import Handover
from tokenbus.worker.process.memory import SharedMemory, shared_file
from tokenbus.worker.process.server import Introduction, PublisherServer

EPOCH = 7
PROOF = bytes(range(16))


class Apart:
    """A worker whose engine and publisher share nothing but the memory and a socket."""

    def __init__(self, on: Bus, settings: Settings) -> None:
        self.bus, self.settings = on, settings
        self._file = shared_file(self.settings)
        self.engine = SyntheticEngine()
        self.handover = Handover(self.settings, self._memory(), EPOCH)
        self.handover.is_running = True
        self.loop = EngineLoop(self.engine, self.handover, unix_ms=on.clock.unix_ms)
        self.line: Line
        self.server: PublisherServer
        self.serving: asyncio.Task[None] | None = None
        self._bell: socket.socket

    def _memory(self) -> SharedMemory:
        return SharedMemory(self._file, self.settings)

    async def start_publisher(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Start a publisher as the engine's process would, which does something meanwhile."""
        mine, self._bell = socket.socketpair()
        for each in (mine, self._bell):
            each.settimeout(0)
        self.line = Line(self.bus._transport)
        state: dict[str, Any] = self.handover.state()
        meanwhile()
        given = Introduction(
            settings=self.settings,
            vocabulary_size=self.engine.vocabulary_size,
            model=None,
            epoch=EPOCH,
            proof=PROOF,
            takes_control=True,
            **state,
        )
        self.server = PublisherServer(self._memory(), self._bell, given, transport=self.line, clock=self.bus.clock)
        self.serving = asyncio.create_task(self.server.run())
        if self.handover.bell is not None:
            self.handover.bell.close()
        self.handover.bell = mine
        await self.bus.settle()

    async def lose_publisher(self) -> None:
        """End the publisher as SIGKILL does: nothing is said, and nothing more is done."""
        self.line.is_dead = True
        assert self.serving is not None
        self.serving.cancel()
        await asyncio.wait({self.serving})
        self._bell.close()

    def lose_engine(self) -> None:
        """End the engine's process as SIGKILL does."""
        assert self.handover.bell is not None
        self.handover.bell.close()

    async def turn(self, times: int = 1) -> None:
        """Let the engine have its turns, and all else go on between them."""
        for _ in range(times):
            self.loop.turn()
            await self.bus.settle()

    async def close(self) -> None:
        if self.serving is not None and not self.serving.done():
            await self.lose_publisher()
        for bell in (self.handover.bell, self._bell):
            if bell is not None:
                bell.close()
        os.close(self._file)


@asynccontextmanager
async def apart(**worker: Any) -> AsyncIterator[Apart]:  # noqa: ANN401 - any setting's value
    """Run a bus, and on it a worker whose publisher is connected."""
    async with bus(workers=0) as on:
        chosen = replace(on.settings.worker, **{"retention_bytes": 2**23, **worker})
        made = Apart(on, replace(on.settings, worker=chosen))
        await made.start_publisher()
        try:
            yield made
        finally:
            await made.close()
