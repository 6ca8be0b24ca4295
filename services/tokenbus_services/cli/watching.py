"""The streams that `tap` and `record` watch: their items, each with the stream that it belongs to.

An item says its sequence and not its stream, so each worker is watched through a client of its own: what comes there
belongs to the stream that was announced last. One more client learns which workers there are.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from tokenbus_contracts.generated.client_pb2 import WatchedStream
from tokenbus_services.bus import Transport
from tokenbus_services.client import Client, WatchedItem
from tokenbus_services.logs import logger
from tokenbus_services.settings import Settings

_MOST_WAITING = 256
_log = logger("watch")


@dataclass(frozen=True, slots=True)
class Seen:
    """An item of a stream, or the news that the stream is there."""

    stream: WatchedStream
    watched: WatchedItem | None

    @property
    def name(self) -> tuple[str, int]:
        """Which stream: its worker, and which life of that."""
        return self.stream.hello.worker_id, self.stream.epoch


class Watching:
    """Takes what several clients see, in one bounded queue."""

    def __init__(self, settings: Settings, worker_id: str, transport: Transport | None = None) -> None:
        """Begin to watch a worker; empty: every worker, as they come, up to processor.max_workers."""
        self._settings = settings
        self._transport = transport
        self._seen: asyncio.Queue[Seen] = asyncio.Queue(_MOST_WAITING)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[Seen] = asyncio.get_running_loop().create_future()
        self._spawn(worker_id)

    async def next(self, stop: asyncio.Event) -> Seen | None:
        """Return what comes next; None once `stop` is set and what waited then was returned."""
        if not self._seen.empty():
            return self._seen.get_nowait()  # without a turn of the event loop, so that nothing more can come between
        if stop.is_set():
            return None
        getting, stopping = asyncio.ensure_future(self._seen.get()), asyncio.ensure_future(stop.wait())
        try:
            waits: list[asyncio.Future[Any]] = [getting, stopping, self._failed]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not getting.done():
                getting.cancel()
        if self._failed.done():
            self._failed.result()
        return getting.result() if getting.done() and not getting.cancelled() else None

    async def close(self) -> None:
        """End all of its clients."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self._failed.done():
            self._failed.cancel()

    def _spawn(self, worker_id: str) -> None:
        if worker_id in self._tasks:
            return
        if len(self._tasks) > self._settings.processor.max_workers:
            _log.warning("too many workers: one is not watched", worker=worker_id, most=len(self._tasks) - 1)
            return
        task = asyncio.create_task(self._follow(worker_id) if worker_id else self._discover())
        task.add_done_callback(self._ended)
        self._tasks[worker_id] = task

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _follow(self, worker_id: str) -> None:
        """Take all that one worker's streams show."""
        stream: WatchedStream | None = None
        async with Client(self._settings, transport=self._transport) as client:
            with suppress(asyncio.CancelledError):  # as at the end: the client leaves as one that nothing happened to
                async for watched in client.watch(worker_id, most=_MOST_WAITING):
                    item = watched if isinstance(watched, WatchedItem) else None
                    if isinstance(watched, WatchedStream):
                        stream = watched
                    if stream is not None:
                        await self._seen.put(Seen(stream, item))

    async def _discover(self) -> None:
        """Learn which workers there are."""
        # With a window of one frame, hardly an item is sent to this client; announcements always are.
        narrow = replace(self._settings, client=replace(self._settings.client, window_frames=1, window_bytes=1))
        async with Client(narrow, transport=self._transport) as client:
            with suppress(asyncio.CancelledError):
                async for watched in client.watch(most=_MOST_WAITING):
                    if isinstance(watched, WatchedStream):
                        self._spawn(watched.hello.worker_id)


@asynccontextmanager
async def watching(settings: Settings, worker_id: str, transport: Transport | None = None) -> AsyncIterator[Watching]:
    """Watch a worker's streams, or every worker's, for as long as this lasts."""
    watch = Watching(settings, worker_id, transport)
    try:
        yield watch
    finally:
        await watch.close()
