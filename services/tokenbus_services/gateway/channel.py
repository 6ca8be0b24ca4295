"""Channel: JSON messages between a gateway's supervisor and one of its processes, with questions and answers."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Self

from tokenbus_services.logs import logger

_log = logger("gateway")
_LENGTH_BYTES = 4
_MOST_BYTES = 2**24
_MOST_QUESTIONS = 256
"""Of the other side, that may be open at once."""


class FailedAnswerError(Exception):
    """The other side failed to answer; its log says why."""


class Channel:
    """One end of a pair of sockets. Each side may tell the other something, and ask for something."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_message: Callable[[str, Any], None],
        on_question: Callable[[str], Awaitable[Any]],
    ) -> None:
        """Take the streams, and what takes what the other side tells and answers what it asks."""
        self._reader = reader
        self._writer = writer
        self._on_message = on_message
        self._on_question = on_question
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    @classmethod
    async def over(
        cls, end: socket.socket, on_message: Callable[[str, Any], None], on_question: Callable[[str], Awaitable[Any]]
    ) -> Self:
        """Return a channel over one socket of a pair, which it closes at its end."""
        end.setblocking(False)  # noqa: FBT003 - a name of the standard library's
        reader, writer = await asyncio.open_unix_connection(sock=end)
        writer.transport.set_write_buffer_limits(0)
        return cls(reader, writer, on_message, on_question)

    def tell(self, what: str, value: object = None) -> None:
        """Tell the other side something; lost if it is gone."""
        self._send({"tell": what, "value": value})

    async def ask(self, what: str, seconds: float) -> Any:  # noqa: ANN401 - JSON
        """Return the other side's answer, or raise a TimeoutError: it did not answer, or is gone.

        A FailedAnswerError says that it failed to answer.
        """
        number = next(self._numbers)
        self._waiting[number] = answer = asyncio.get_running_loop().create_future()
        try:
            self._send({"ask": what, "number": number})
            async with asyncio.timeout(seconds):
                return await answer
        finally:
            del self._waiting[number]

    async def flush(self) -> None:
        """Wait until what was said has been sent."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def run(self) -> None:
        """Take what the other side sends, until it is gone."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "little")
                self._take(json.loads(await self._reader.readexactly(size)))

    def close(self) -> None:
        """Close this end."""
        for task in self._answering:
            task.cancel()
        self._writer.close()

    def _take(self, message: dict[str, Any]) -> None:
        if "tell" in message:
            self._on_message(message["tell"], message["value"])
        elif "ask" in message:
            if len(self._answering) < _MOST_QUESTIONS:
                task = asyncio.create_task(self._answer(message["ask"], message["number"]))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
        else:
            waiting = self._waiting.get(message["number"])
            if waiting is None or waiting.done():
                return
            if "failed" in message:
                waiting.set_exception(FailedAnswerError(message["failed"]))
            else:
                waiting.set_result(message["value"])

    async def _answer(self, what: str, number: int) -> None:
        try:
            message = {"number": number, "value": await self._on_question(what)}
        except Exception as error:  # noqa: BLE001 - the other side must not wait for an answer that does not come
            _log.error("a question could not be answered", question=what, exc_info=error)
            message = {"number": number, "failed": repr(error)}
        self._send(message)

    def _send(self, message: dict[str, object]) -> None:
        data = json.dumps(message).encode()
        # A side that reads nothing gets nothing more: questions end by their timeout.
        if not self._writer.is_closing() and self._writer.transport.get_write_buffer_size() < _MOST_BYTES:
            self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
