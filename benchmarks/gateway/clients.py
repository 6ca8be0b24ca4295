"""The clients of the gateway's benchmark: streams that follow each other, read and hardly looked at.

`python -m benchmarks.gateway.clients HOST PORT`: a JSON body on each line of its input is asked for by all connections
until the next line comes; then a line says what came.
"""

import asyncio
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

CONNECTIONS = 256
_LAST = re.compile(rb'"completion_tokens":(\d+)')
_EVENT = b"data: {"
_TAIL = 400
"""In bytes; the usage, which comes last, is in there."""


class Reader(asyncio.Protocol):
    """One connection: asks again when its stream has ended."""

    def __init__(self, number: int) -> None:
        """Take its number, from which its seeds follow."""
        self._transport: asyncio.Transport | None = None
        self._request: dict[str, Any] | None = None
        self._number = number
        self._seed = number << 32
        self._tail = b""
        self.is_idle = True
        self.bytes = 0
        self.events = 0
        self.tokens = 0
        self.answers = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Be connected."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - TCP's always is
        self._transport = transport

    def ask_for(self, request: dict[str, Any] | None) -> None:
        """Ask for this from now on; None: for nothing more."""
        self._request = request
        if self.is_idle and request is not None:
            # The first answers are of all lengths, so that later ones begin and end at all times, as with real clients.
            self._ask(share=(self._number + 1) / CONNECTIONS)

    def data_received(self, data: bytes) -> None:
        """Count, and look whether that was the end."""
        self.bytes += len(data)
        self.events += data.count(_EVENT)
        self._tail = (self._tail + data)[-_TAIL:] if len(data) < _TAIL else data[-_TAIL:]
        if self._tail.endswith(b"0\r\n\r\n"):
            found = _LAST.search(self._tail)
            if found is None or b"[DONE]" not in self._tail:
                raise SystemExit(f"a stream ended otherwise: {self._tail!r}")
            self.tokens += int(found[1])
            self.answers += 1
            self._tail = b""
            self._ask()

    def _ask(self, share: float = 1) -> None:
        self.is_idle = self._request is None
        if self._request is None or self._transport is None:
            return
        self._seed += 1
        tokens = math.ceil(int(self._request["max_tokens"]) * share)
        body = json.dumps({**self._request, "max_tokens": tokens, "seed": self._seed}).encode()
        head = f"POST /v1/{self._request_path()} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def _request_path(self) -> str:
        return "chat/completions" if self._request and "messages" in self._request else "completions"


async def main(arguments: Sequence[str]) -> None:
    """Connect, and ask for what is said."""
    host, port = arguments
    loop = asyncio.get_running_loop()
    readers = []
    for number in range(CONNECTIONS):
        reader = Reader(number)
        await loop.create_connection(lambda reader=reader: reader, host, int(port))  # type: ignore[misc]
        readers.append(reader)
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        for reader in readers:
            reader.ask_for(request)
        if request is None:
            while not all(reader.is_idle for reader in readers):  # noqa: ASYNC110 - 256 ends, and no hurry
                await asyncio.sleep(0.05)
        told = {name: sum(getattr(each, name) for each in readers) for name in ("bytes", "events", "tokens", "answers")}
        sys.stdout.write(json.dumps({**told, "at": time.time(), "cpu": time.process_time()}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
