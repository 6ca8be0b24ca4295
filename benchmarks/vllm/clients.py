"""The client of both systems, one process: `python -m benchmarks.vllm.clients`.

Each line of its input is a round as JSON: `addresses`, `path`, and for each stream the `bodies` that it asks for one
after the other. All streams begin at once, each on a connection of its own, made before. The line that it answers has
what each request saw. Answers are counted and hardly looked at, so that the client costs as little as it can.
"""

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

PATIENCE = 600.0
"""How long a round may take, in seconds."""
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
_EVENT = b"data: {"
_END = b"0\r\n\r\n"
_OK = b"HTTP/1.1 200 "
_TAIL = 1000
"""In bytes; the usage, which comes last, is in there."""


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

    def __init__(self, requests: Sequence[bytes], on_end: Callable[[Exception | None], None]) -> None:
        """Take the requests as they are written, and whom to call when all are answered, or one is not."""
        self.answers: list[Answer] = []
        self._requests = iter(requests)
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._begin()

    def _begin(self) -> None:
        self._tail = b""
        self._written = self._first = 0.0
        self._events = self._bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Be connected."""
        self._transport = transport  # type: ignore[assignment]  # TCP's always is one

    def connection_lost(self, exc: Exception | None) -> None:
        """End, unless all is answered."""
        self._fail(f"the server closed the connection ({exc or 'without an error'})")

    def ask(self) -> None:
        """Write the next request; without one, this stream is done."""
        request = next(self._requests, None)
        if request is None or self._transport is None:
            self._leave(None)
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
        found = data.count(_EVENT)
        if found:
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
            times = self._written, self._first, ended
            self.answers.append(Answer(*times, int(usage[1]), self._events, self._bytes))
            self.ask()

    def _fail(self, why: str) -> None:
        self._leave(RefusedError(" ".join(why.split())[:_TAIL]))

    def _leave(self, error: Exception | None) -> None:
        on_end, self._on_end = self._on_end, lambda _error: None
        on_end(error)
        if self._transport is not None:
            self._transport.close()


async def answered(order: dict[str, Any]) -> list[list[Answer]]:
    """Ask for a round, and return what each stream's requests saw."""
    loop = asyncio.get_running_loop()
    addresses, streams, ends = order["addresses"], [], []
    for number, bodies in enumerate(order["bodies"]):
        host, port = addresses[number % len(addresses)].rsplit(":", 1)
        requests = [_request(order["path"], json.dumps(body).encode()) for body in bodies]
        end = loop.create_future()
        stream = Stream(requests, lambda error, end=end: _settle(end, error))  # type: ignore[misc]
        await loop.create_connection(lambda stream=stream: stream, host, int(port))  # type: ignore[misc]
        streams.append(stream)
        ends.append(end)
    for stream in streams:
        stream.ask()
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*ends)
    return [stream.answers for stream in streams]


def _settle(end: "asyncio.Future[None]", error: Exception | None) -> None:
    if not end.done():
        if error is None:
            end.set_result(None)
        else:
            end.set_exception(error)


def _request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


async def main() -> None:
    """Answer rounds until there are no more."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        before = time.process_time()
        try:
            streams = await answered(json.loads(line))
            told = {"streams": streams, "cpu": time.process_time() - before}
        except (RefusedError, OSError, TimeoutError) as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


def _loop() -> asyncio.AbstractEventLoop:
    """Return the fastest event loop that is there: vLLM brings one."""
    try:
        import uvloop  # noqa: PLC0415 - only where vLLM is, or the tools
    except ImportError:
        return asyncio.new_event_loop()
    made: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return made


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=_loop) as runner:
        runner.run(main())
