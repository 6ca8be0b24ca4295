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
from tokenbus.worker.engine import EngineDescription
from tokenbus.worker.engine_loop import EngineLoop
from tokenbus.worker.process.memory import SharedMemory, shared_file
from tokenbus.worker.process.server import Introduction, PublisherServer
from tokenbus.worker.process.shared_memory_publisher import SharedMemoryPublisher

EPOCH = 7
PROOF = bytes(range(16))


class Apart:
    """A worker whose engine and publisher share nothing but the memory and a socket."""

    def __init__(self, on: Bus, settings: Settings, engine: SyntheticEngine) -> None:
        self.bus, self.settings, self.engine = on, settings, engine
        self._file = shared_file(self.settings)
        self.publisher = SharedMemoryPublisher(self.settings, self._memory(), EPOCH)
        self.publisher.is_running = True
        self.loop = EngineLoop(self.engine, self.publisher, unix_ms=on.clock.unix_ms)
        self.line: Line
        self.server: PublisherServer
        self.serving: asyncio.Task[None] | None = None
        self._bell: socket.socket

    def _memory(self) -> SharedMemory:
        return SharedMemory(self._file, self.settings)

    async def start_publisher(
        self, meanwhile: Callable[[], object] = lambda: None, stores: "Stores | None" = None
    ) -> None:
        mine, self._bell = socket.socketpair()
        for each in (mine, self._bell):
            each.settimeout(0)
        self.line = Line(self.bus._transport)
        state: dict[str, Any] = self.publisher.state()
        meanwhile()
        given = Introduction(
            settings=self.settings,
            vocabulary_size=self.engine.vocabulary_size,
            description=EngineDescription(takes_control=True),
            epoch=EPOCH,
            proof=PROOF,
            **state,
        )
        memory = self._memory()
        if stores is not None:
            stores.watch(memory, self.line)
        self.server = PublisherServer(memory, self._bell, given, transport=self.line, clock=self.bus.clock)
        if stores is not None:
            stores.has_begun = True
        self.serving = asyncio.create_task(self.server.run())
        if self.publisher.bell is not None:
            self.publisher.bell.close()
        self.publisher.bell = mine
        await self.bus.settle()

    async def lose_publisher(self) -> None:
        self.line.is_dead = True
        assert self.serving is not None
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)
        self._bell.close()

    def lose_engine(self) -> None:
        assert self.publisher.bell is not None
        self.publisher.bell.close()

    async def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.turn()
            await self.bus.settle()

    async def close(self) -> None:
        if self.serving is not None and not self.serving.done():
            await self.lose_publisher()
        for bell in (self.publisher.bell, self._bell):
            if bell is not None:
                bell.close()
        os.close(self._file)


class DiedError(BaseException):
    """The publisher's process ended here; nothing of the publisher takes it for a defect of its own."""


class Stores:
    """The words that a publisher stores into the shared memory, before one of which it dies."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.places: list[str] = []
        """Which word each was, in their order."""
        self.has_begun = self.has_ended = False
        self._dies_at = dies_at

    def watch(self, memory: SharedMemory, line: Line) -> None:
        """Have each store into a publisher's memory come by here; a dead publisher's line is dead, too."""
        self._line = line
        memory.words = _Words(memory.words, self, "words")  # type: ignore[assignment]  # it does as a memoryview does
        for name in ("steps", "requests", "journal"):
            ring = getattr(memory, name)
            ring._words = _Words(ring._words, self, name)

    def come(self, place: str) -> None:
        """Note a store that is about to happen, or end the publisher instead, once it has begun."""
        if not self.has_begun:
            return
        if self.has_ended or len(self.places) == self._dies_at:
            self.has_ended = self._line.is_dead = True
            raise DiedError(place)
        self.places.append(place)


class _Words:
    def __init__(self, words: memoryview, stores: Stores, name: str) -> None:
        self._words, self._stores, self._name = words, stores, name

    def __getitem__(self, place: int) -> int:
        found: int = self._words[place]
        return found

    def __setitem__(self, place: int, value: int) -> None:
        self._stores.come(f"{self._name}[{place}]")
        self._words[place] = value


@asynccontextmanager
async def apart(*, drafts: bool = False, **worker: Any) -> AsyncIterator[Apart]:  # noqa: ANN401 - any setting's value
    async with bus(workers=0) as on:
        chosen = replace(on.settings.worker, **{"retention_bytes": 2**23, **worker})
        made = Apart(on, replace(on.settings, worker=chosen), SyntheticEngine(drafts=drafts, role=chosen.role))
        await made.start_publisher()
        try:
            yield made
        finally:
            await made.close()
