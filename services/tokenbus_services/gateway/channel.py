"""Channel: lines of JSON between a gateway's supervisor and one of its processes."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any, Self

_MOST_BYTES = 2**24
"""Of a line, and of what the other side has not read."""


class Channel:
    """One end of a pair of sockets."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send and receive over the streams."""
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> Self:
        """Return a channel over one socket of a pair, which `close` closes."""
        return cls(*await asyncio.open_unix_connection(sock=end, limit=_MOST_BYTES))

    def send(self, **message: object) -> None:
        """Send a message; it is lost if the other side is gone, or has not read the ones before."""
        if not self._writer.is_closing() and self._writer.transport.get_write_buffer_size() < _MOST_BYTES:
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """Yield what the other side sends, until it is gone."""
        with contextlib.suppress(ConnectionError):
            async for line in self._reader:
                yield json.loads(line)

    async def close(self) -> None:
        """Send what waits, and close this end."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
