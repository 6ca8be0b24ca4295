"""The items that `tap`, `record` and `log` watch, or that a durable log has.

A frame with an item has its sequence and not its stream, so each worker is watched through a client of its own: an item
that comes there belongs to the stream that was announced last. One more client learns which workers there are.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Self

from tokenbus_contracts.generated.client_pb2 import WatchedStream
from tokenbus_services.bus import Transport, require_nats
from tokenbus_services.client import Client
from tokenbus_services.items import StreamItem
from tokenbus_services.logs import logger
from tokenbus_services.settings import Settings

_MOST_WAITING = 256
_WINDOW_FRAMES = 512
"""Enough for a few tenths of a second of a fast worker's stream."""
_log = logger("watch")


class Watching:
    """Iterates over the items that several clients see, in one bounded queue."""

    def __init__(self, settings: Settings, worker_id: str, stop: asyncio.Event, transport: Transport | None) -> None:
        """Begin to watch; once `stop` is set, and what waited then was taken, the iteration ends."""
        self._settings = settings
        self._transport = transport
        self._seen: asyncio.Queue[StreamItem | Exception | None] = asyncio.Queue(_MOST_WAITING)
        self._watched: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._watch(worker_id)
        self._begin(self._end(stop))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamItem:
        # While items wait, no turn of the event loop is taken, so that nothing more can come between.
        seen = await self._seen.get()
        if seen is None:
            raise StopAsyncIteration
        if isinstance(seen, Exception):
            raise seen
        return seen

    async def close(self) -> None:
        """End all of its clients."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _watch(self, worker_id: str) -> None:
        """Begin to watch a worker, up to processor.max_workers; empty: every worker, as they come."""
        if worker_id in self._watched:
            return
        if len(self._watched) > self._settings.processor.max_workers:
            _log.warning("too many workers: one is not watched", worker=worker_id, most=len(self._watched) - 1)
            return
        self._watched.add(worker_id)
        self._begin(self._follow(worker_id) if worker_id else self._discover())

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.append(asyncio.create_task(self._reported(work)))

    async def _reported(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - whatever it is, the iteration raises it
            await self._seen.put(error)

    async def _end(self, stop: asyncio.Event) -> None:
        await stop.wait()
        await self._seen.put(None)

    async def _follow(self, worker_id: str) -> None:
        """Take each item of one worker's streams, and count those that are missing before it."""
        stream: WatchedStream | None = None
        next_sequence = 0
        async with Client(self._settings, transport=self._transport) as client:
            with suppress(asyncio.CancelledError):  # as at the end: the client leaves as one that nothing happened to
                async for watched in client.watch(worker_id, most=_MOST_WAITING):
                    if isinstance(watched, WatchedStream):
                        if stream is None or stream.epoch != watched.epoch:
                            next_sequence = 0
                        stream = watched
                    elif stream is not None:
                        sequence, kind = watched.item.sequence, watched.item.payload_kind
                        item = StreamItem(stream.hello, stream.epoch, sequence, kind, watched.payload)
                        item.missing_items = max(0, sequence - next_sequence) if next_sequence else 0
                        next_sequence = max(next_sequence, sequence + 1)
                        await self._seen.put(item)

    async def _discover(self) -> None:
        """Learn which workers there are."""
        # With a window of one frame, hardly an item is sent to this client; announcements always are.
        narrow = replace(self._settings, client=replace(self._settings.client, window_frames=1, window_bytes=1))
        async with Client(narrow, transport=self._transport) as client:
            with suppress(asyncio.CancelledError):
                async for watched in client.watch(most=_MOST_WAITING):
                    if isinstance(watched, WatchedStream):
                        self._watch(watched.hello.worker_id)


@asynccontextmanager
async def watching(
    settings: Settings, worker_id: str, stop: asyncio.Event, transport: Transport | None = None
) -> AsyncIterator[Watching]:
    """Iterate over the items of a worker's streams, or every worker's, until `stop` is set."""
    items = Watching(settings, worker_id, stop, transport)
    try:
        yield items
    finally:
        await items.close()


def logged(address: str, worker_id: str, settings: Settings) -> AsyncGenerator[StreamItem, None]:
    """Return an iterator over what a log has by now of a worker, or of every worker."""
    require_nats(address)
    from tokenbus_services.durable_log.reader import read_log  # noqa: PLC0415 - needs an extra

    return read_log(address, worker_id=worker_id, settings=settings)


def widened(settings: Settings) -> Settings:
    """Return settings with a window that leaves hardly an item of a fast worker out."""
    client = replace(settings.client, window_frames=max(settings.client.window_frames, _WINDOW_FRAMES))
    return replace(settings, client=client)
