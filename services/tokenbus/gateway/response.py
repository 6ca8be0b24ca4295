"""AnswerResponse: sends an answer, and aborts it if the client disconnects or does not read."""

import asyncio
import time
import zlib
from collections.abc import Callable, Mapping

import orjson
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tokenbus.gateway.answer import JSON, Answer
from tokenbus.gateway.buffers import Sending, Write
from tokenbus.gateway.connection import ChunkWriter, Connection, connection_of
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.gateway import Gateway
from tokenbus.gateway.messages_format import message_error
from tokenbus.logs import logger

_log = logger("gateway")
RAW_SEND = "tokenbus.send"
NO_STORE = {"cache-control": "no-store"}
_NS = 1_000_000_000
_GZIP_LEVEL, _GZIP_BITS, _GZIP_MEMORY = 1, 16 + 12, 5
"""zlib's parameters. A window of 4 KiB is longer than an event, and takes 40 kB per stream instead of 260 kB."""
_PIECE_BYTES = 65_536
_LONG_BYTES = 16_384
"""Number of bytes above which compressing takes so long that answers take turns."""
_STREAMED = [(b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]


def error_response(error: ApiError, path: str) -> Response:
    body = message_error(error) if path.startswith("/v1/messages") else error.body
    return JSONResponse(body, status_code=error.status, headers={**NO_STORE, **error.headers})


def json_response(content: object, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, NO_STORE, JSON)


def _written_load(form: str, load: Mapping[str, float]) -> bytes:
    """Return the load in a format of ORCA, for proxies that choose servers by load."""
    if form.lower() == "json":
        return b"JSON " + orjson.dumps({"named_metrics": load})
    return "TEXT {}".format(", ".join(f"named_metrics.{name}={value}" for name, value in load.items())).encode()


class AnswerResponse(Response):
    """Sends one answer to the client."""

    def __init__(self, answer: Answer, name: str, close: Callable[[], None], gateway: Gateway) -> None:
        super().__init__()
        self._answer = answer
        self._name = (b"x-request-id", name.encode())
        self._is_cut = False
        self._close_requests = close
        self._gateway = gateway
        self._counts = gateway.counts
        self._buffers = gateway.buffers
        self._buffers.join(answer)
        self._gzip: _Gzip | None = None
        self._asked_at = time.monotonic()
        self._first_at: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.current_task()
        disconnecting = asyncio.create_task(self._wait_for_disconnect(receive))
        disconnecting.add_done_callback(lambda _: self._disconnected(sending))
        self._counts.open_answers += 1
        try:
            await self._send_all(scope, receive, send)
        except asyncio.CancelledError:
            # If the client disconnected, this cancellation ends here. Other cancellations are passed on.
            if not disconnecting.done() or disconnecting.cancelled():
                raise
            if sending is not None:
                sending.uncancel()
        finally:
            self._counts.open_answers -= 1
            disconnecting.cancel()
            if self._answer.error is not None and self._answer.has_begun:
                self._counts.broken_answers[self._answer.error.code or "other"] += 1
            if self._answer.error is not None and self._answer.error.code == "slow_client":
                values = {"request": self._name[1].decode(), "reason": self._answer.error.message}
                self._gateway.repeated_log.begin(
                    "slow", _log.warning, "answer ended: its client reads too slowly", **values
                )
            self._close_requests()
            # Later rows are dropped.
            self._answer.queue.close()
            self._answer.drop()
            self._buffers.leave(self._answer)
            self._count_requests()
            self._answer.release()

    def _count_requests(self) -> None:
        ended_at = time.monotonic()
        for outcome in self._answer.outcomes():
            first_at = outcome.first_at or self._first_at
            self._counts.models[outcome.model].count(outcome, self._asked_at, first_at, ended_at)

    @staticmethod
    async def _wait_for_disconnect(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    def _disconnected(self, sending: "asyncio.Task[object] | None") -> None:
        if sending is not None and not self._answer.queue.is_sent and not sending.done():
            self._counts.left_clients += not self._is_cut
            sending.cancel()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        queue = self._answer.queue
        await self._answer.ready()
        if self._answer.error is not None and not self._answer.has_begun:
            queue.is_sent = True
            response = error_response(await self._gateway.explained(self._answer.error), scope["path"])
            response.raw_headers.append(self._name)
            await response(scope, receive, send)
            return
        size, first = queue.length, queue.take()
        is_streamed = self._answer.is_streamed
        if first.produced_at_ns or not is_streamed:
            self._first_at = time.monotonic()
        of_whole = [(b"content-length", b"%d" % size), (b"cache-control", b"no-store")]
        headers = [(b"content-type", self._answer.content_type.encode()), *(_STREAMED if is_streamed else of_whole)]
        if self._gateway.settings.gateway.compression == "gzip":
            headers = [*headers, (b"vary", b"accept-encoding")]
            if _accepts_gzip(scope):
                self._gzip = _Gzip()
                headers = [each for each in headers if each[0] != b"content-length"]
                headers.append((b"content-encoding", b"gzip"))
        if form := dict(scope["headers"]).get(b"endpoint-load-metrics-format"):
            load = _written_load(form.decode("latin-1"), self._gateway.load_report())
            headers = [*headers, (b"endpoint-load-metrics", load)]
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, self._name]})
        send = scope.get("extensions", {}).get(RAW_SEND, send)
        connection = connection_of(scope)
        if connection is not None:
            queue.unsent = connection.unsent
        await self._send(send, first)
        if connection is not None and not first.is_last:
            self._connect(connection, connection.writer(scope))
        while not first.is_last:
            await queue.ready()
            await self._let_others_run()
            # While the connection is full, bytes stay in the queue, which counts them and can drop them.
            has_room = connection is None or not connection.is_full or await connection.has_room()
            if connection is not None and (queue.is_broken or not has_room):
                self._counts.cut_clients += 1
                self._is_cut = True
                queue.is_sent = True
                connection.cut_off()
                return
            first = queue.take()
            await self._send(send, first)

    async def _let_others_run(self) -> None:
        """Let other tasks run before a long part is sent, because with a fast client, sending never waits."""
        queue = self._answer.queue
        if queue.has_parts or (self._gzip is not None and queue.length > _LONG_BYTES):
            await self._buffers.turns.next()
        elif self._gzip is not None or queue.length > _PIECE_BYTES:
            await asyncio.sleep(0)

    def _connect(self, connection: Connection, write: ChunkWriter | None) -> None:
        queue, choices = self._answer.queue, self._answer.choices
        queue.write = write if write is None or self._gzip is None else self._gzip.before(write, connection)
        if self._gzip is None and len(choices) == 1:  # other choices could write within a partly sent event
            queue.direct, connection.stream = write, choices[0].stream

    async def _send(self, send: Send, sending: Sending) -> None:
        self._answer.queue.is_sent = sending.is_last
        data = sending.data if self._gzip is None else self._gzip.compress(sending.data, is_last=sending.is_last)
        await send({"type": "http.response.body", "body": data, "more_body": not sending.is_last})
        now = time.time_ns()
        for produced_at_ns in sending.produced_at_ns:
            self._counts.to_socket.observe((now - produced_at_ns) / _NS)


class LongResponse(Response):
    """Sends a long answer in pieces as the client reads. The bytes count towards the bound of request bodies."""

    def __init__(self, data: bytes, who: str, gateway: Gateway) -> None:
        super().__init__(media_type=JSON)
        self._data = data
        self._who = who
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's
        """Send the answer. Clients that do not read, or that have too many waiting answers, are cut off."""
        headers = [
            (b"content-type", JSON.encode()),
            (b"content-length", b"%d" % len(self._data)),
            (b"cache-control", b"no-store"),
        ]
        connection = connection_of(scope)
        try:
            async with self._gateway.bodies.hold(self._who) as held:
                held.grow_to(len(self._data))
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                for begin in range(0, len(self._data), _PIECE_BYTES):
                    if connection is not None and not await connection.has_room():
                        self._gateway.counts.cut_clients += 1
                        connection.cut_off()
                        return
                    piece, more = self._data[begin : begin + _PIECE_BYTES], begin + _PIECE_BYTES < len(self._data)
                    await send({"type": "http.response.body", "body": piece, "more_body": more})
                    await asyncio.sleep(0)
        except ApiError:
            if connection is not None:
                connection.cut_off()


class _Gzip:
    """The compressor of one answer, which makes each write readable at once."""

    def __init__(self) -> None:
        self._stream = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_BITS, _GZIP_MEMORY)

    def compress(self, data: bytes, *, is_last: bool = False) -> bytes:
        return self._stream.compress(data) + self._stream.flush(zlib.Z_FINISH if is_last else zlib.Z_SYNC_FLUSH)

    def before(self, write: Write, connection: Connection) -> Write:

        def compressed(chunk: bytes, *produced_at_ns: int) -> bool:
            """Write a chunk unless the connection is full, because a refused chunk could not be compressed again."""
            return not connection.is_full and write(self.compress(chunk), *produced_at_ns)

        return compressed


def _accepts_gzip(scope: Scope) -> bool:
    given = Headers(scope=scope).get("accept-encoding", "").lower().replace(" ", "")
    return any(each == "gzip" or (each.startswith("gzip;q=") and each[7:].strip("0.")) for each in given.split(","))
