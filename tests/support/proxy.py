"""A TCP proxy on this machine whose link a test can cut and restore."""

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit

_CHUNK = 65536


class Proxy:
    """Passes bytes on between each peer that connects and one address."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self._is_cut = False
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""
        self.passed = 0
        """How many bytes went through."""

    async def __aenter__(self) -> "Proxy":
        """Listen, at a port of its own."""
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._drop()

    def cut(self) -> None:
        """Reset every connection, and each new one, until the link is restored."""
        self._is_cut = True
        self._drop()

    def restore(self) -> None:
        """Let connections through again."""
        self._is_cut = False

    def _drop(self) -> None:
        for writer in self._links:
            writer.transport.abort()
        self._links.clear()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            there = await asyncio.open_connection(self._target.hostname, self._target.port)
        except OSError:
            writer.transport.abort()
            return
        self._links |= {writer, there[1]}
        for source, sink in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(_CHUNK):
                sink.write(data)
                await sink.drain()
                self.passed += len(data)
        sink.transport.abort()
