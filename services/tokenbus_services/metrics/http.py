"""The few lines of HTTP that a scrape and a health check need: one request a connection, bounded in size and time."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tokenbus_services.logs import DeduplicatedLog, logger

_log = logger("metrics")
MOST_HEADER_BYTES = 8192
_MOST_CONNECTIONS = 16
_MOST_SECONDS = 10.0
_END = b"\r\n\r\n"
_METHODS = ("GET", "HEAD")
_TEXT = "text/plain; charset=utf-8"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
} | {503: "Service Unavailable"}


class Answer(NamedTuple):
    """What a request is answered with."""

    status: int
    body: bytes
    kind: str = _TEXT


Page = Callable[[], Awaitable[Answer]]


class Pages:
    """Answers GET and HEAD for a few paths; a slow or silent peer keeps nobody else waiting, and is cut off."""

    def __init__(self, pages: dict[str, Page]) -> None:
        """Take what answers each path."""
        self._pages = pages
        self._connections = 0
        self._repeated_log = DeduplicatedLog()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the one request of a connection."""
        if self._connections >= _MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections += 1
        try:
            # Who goes away, or takes too long, misses the answer; nobody is to be told.
            with contextlib.suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError):
                async with asyncio.timeout(_MOST_SECONDS):
                    method, answer = await self._answer(reader)
                    writer.write(_written(method, answer))
                    writer.close()
                    await writer.wait_closed()
        finally:
            writer.transport.abort()
            self._connections -= 1

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, Answer]:
        try:
            method, path = _request(await reader.readuntil(_END))
        except asyncio.LimitOverrunError:
            return "GET", Answer(400, b"the request's header is too long\n")
        except ValueError as error:
            return "GET", Answer(400, f"{error}\n".encode())
        page = self._pages.get(path)
        if method not in _METHODS:
            answer = Answer(405, b"GET and HEAD only\n")
        elif page is None:
            answer = Answer(404, f"there is {' and '.join(self._pages)}\n".encode())
        else:
            answer = await self._made(page, path)
        return method, answer

    async def _made(self, page: Page, path: str) -> Answer:
        try:
            return await page()
        except Exception:  # noqa: BLE001 - whatever it is
            # A defect of ours must not end what serves all others.
            self._repeated_log.begin("page", _log.exception, "a page could not be made", path=path)
            return Answer(500, b"this page could not be made; the log says why\n")


def _request(head: bytes) -> tuple[str, str]:
    """Return what a request asks for: the method, and the path without its query."""
    words = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):  # noqa: PLR2004 - method, target, protocol
        raise ValueError("this is no request of HTTP/1.1")
    return words[0], words[1].partition("?")[0]


def _written(method: str, answer: Answer) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}",
        f"Content-Type: {answer.kind}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    if answer.status == 405:  # noqa: PLR2004 - a status speaks for itself
        lines.append("Allow: GET, HEAD")
    head = "\r\n".join([*lines, "", ""]).encode()
    return head if method == "HEAD" else head + answer.body
