"""Clients of an OpenAI-compatible server, many in one process: they count what comes, and hardly look at it.

`ask_round` and `keep_asking` are tasks of a `Child`, so that the clients cost the measured processes no time.
"""

import asyncio
import json
import math
import re
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from itertools import count as counting
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

import uvloop

from benchmarks.processes import PATIENCE

_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
_EVENT = b"data: {"
_END = b"0\r\n\r\n"
_OK = b"HTTP/1.1 200 "
_TAIL = 1000
"""In bytes; the usage, which comes last, is in there."""
R = TypeVar("R")


class Answer(NamedTuple):
    """What one request saw; times are the monotonic clock's, in seconds."""

    written: float
    first: float
    """When its first event came."""
    ended: float
    tokens: int
    """As the server's own usage says."""
    events: int
    bytes: int


class RefusedError(Exception):
    """A server answered otherwise than with a whole stream."""


class Stream(asyncio.Protocol):
    """One connection, and the requests that are asked on it one after the other."""

    def __init__(self, requests: Iterable[bytes]) -> None:
        self.answers: list[Answer] = []
        self.bytes = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests = iter(requests)
        self._transport: Any = None
        self._begin()

    def _begin(self) -> None:
        self._tail = b""
        self._written = self._first = 0.0
        self._events = self._bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the server closed the connection ({exc or 'without an error'})")

    def ask(self) -> None:
        request = next(self._requests, None)
        if request is None:
            if not self.ended.done():
                self.ended.set_result(None)
            self._transport.close()
            return
        self._begin()
        self._written = time.monotonic()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Count, and look whether that was the end."""
        if not self._bytes and not data.startswith(_OK):
            self._fail(data.decode(errors="replace"))
            return
        self._bytes += len(data)
        self.bytes += len(data)
        if found := data.count(_EVENT):
            if not self._events:
                self._first = time.monotonic()
            self._events += found
        self._tail = (self._tail + data)[-_TAIL:] if len(data) < _TAIL else data[-_TAIL:]
        if self._tail.endswith(_END):
            ended = time.monotonic()
            usage = _USAGE.search(self._tail)
            if usage is None or b"[DONE]" not in self._tail:
                self._fail(f"a stream without its end: {self._tail!r}")
                return
            self.answers.append(Answer(self._written, self._first, ended, int(usage[1]), self._events, self._bytes))
            self.ask()

    def _fail(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(RefusedError(" ".join(why.split())[:_TAIL]))
        self._transport.close()


def ask_round(
    _connection: Connection, addresses: Sequence[str], path: str, bodies: Sequence[Sequence[dict[str, Any]]]
) -> tuple[list[Answer], float]:
    """Ask for each stream's bodies, all streams at once; return what each request saw, and the processor seconds."""
    before = time.process_time()
    requests = [[_request(path, body) for body in own] for own in bodies]
    return _run(_answered(addresses, requests)), time.process_time() - before


async def _answered(addresses: Sequence[str], requests: Sequence[Iterable[bytes]]) -> list[Answer]:
    streams = await _connected(addresses, requests)
    for stream in streams:
        stream.ask()
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(stream.ended for stream in streams))
    return [answer for stream in streams for answer in stream.answers]


async def _connected(addresses: Sequence[str], requests: Sequence[Iterable[bytes]]) -> list[Stream]:
    loop, streams = asyncio.get_running_loop(), []
    for number, own in enumerate(requests):
        host, port = addresses[number % len(addresses)].rsplit(":", 1)
        streams.append((await loop.create_connection(lambda own=own: Stream(own), host, int(port)))[1])  # type: ignore[misc]
    return streams


def keep_asking(connection: Connection, address: str, path: str, body: dict[str, Any], streams: int) -> None:
    """Keep so many streams open: each asks again when its answer has ended.

    Each True that comes over the connection is answered with the bytes so far; False ends the task once all streams
    have ended. The first answers are of all lengths, so that later ones begin and end at all times, as real ones do.
    """
    _run(_kept(connection, address, path, body, streams))


async def _kept(connection: Connection, address: str, path: str, body: dict[str, Any], streams: int) -> None:
    goes_on = True

    def requests(number: int) -> Iterator[bytes]:
        for turn in counting():
            if not goes_on:
                return
            tokens = math.ceil(body["max_tokens"] * (1 if turn else (number + 1) / streams))
            yield _request(path, {**body, "max_tokens": tokens, "seed": (number << 32) + turn})

    asking = await _connected([address], [requests(number) for number in range(streams)])
    for stream in asking:
        stream.ask()
    while goes_on:
        goes_on = await asyncio.to_thread(connection.recv)
        if goes_on:
            connection.send(sum(stream.bytes for stream in asking))
    await asyncio.gather(*(stream.ended for stream in asking))


def _request(path: str, body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    return f"{head}\r\n\r\n".encode() + text


def _run(coroutine: Coroutine[Any, Any, R]) -> R:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)
