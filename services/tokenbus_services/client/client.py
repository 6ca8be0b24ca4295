"""Client: requests in, their tokens out, through the loss of connections and of processors."""

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import NamedTuple, Self

from tokenbus_contracts import LogprobBatch
from tokenbus_contracts.generated.client_pb2 import ClientHello, ProcessorStatus, ServerFrame, WatchedStream
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate, RequestError
from tokenbus_contracts.generated.stream_pb2 import Item
from tokenbus_contracts.schema import MAJOR, MINOR
from tokenbus_services.bus import Transport, transport_for
from tokenbus_services.client.session import ClientSession
from tokenbus_services.clock import Clock, SystemClock
from tokenbus_services.delivery import RequestFailedError, RequestTokens
from tokenbus_services.link import Link
from tokenbus_services.settings import Settings


class WatchedItem(NamedTuple):
    """An item of a watched stream, as its worker published it."""

    item: Item
    payload: bytes


class Client:
    """A client of a processor, for as long as `async with` lasts."""

    def __init__(
        self, settings: Settings | None = None, *, transport: Transport | None = None, clock: Clock | None = None
    ) -> None:
        """Take the settings, by default those of the environment; a transport and a clock may be handed in."""
        self.settings = settings or Settings.load()
        client, bus = self.settings.client, self.settings.bus
        hello = ClientHello(
            schema_major=MAJOR,
            schema_minor=MINOR,
            name=client.name,
            window_frames=client.window_frames,
            window_bytes=client.window_bytes,
            session=_drawn(),
        )
        self._session = ClientSession(
            hello,
            self.settings.limits,
            client.request_buffer_rows,
            interval=bus.heartbeat_interval_ms / 1000,
            timeout=bus.heartbeat_timeout_ms / 1000,
        )
        self._clock = clock or SystemClock()
        self._link = Link(self._session, contextlib.nullcontext(), self._clock, "client")
        self._transport = transport
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = asyncio.Event()

    @property
    def session(self) -> ClientSession:
        """What is known of the connection and the open requests."""
        return self._session

    @property
    def is_running(self) -> bool:
        """Whether what carries its messages runs."""
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    async def __aenter__(self) -> Self:
        """Connect; the processor need not be there yet."""
        transport = self._transport or transport_for(self.settings.bus)
        started = asyncio.Event()
        running = asyncio.create_task(self._link.run(transport, self.settings.bus.clients_address, started.set))
        waiting = asyncio.create_task(started.wait())
        await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if running.done():
            running.result()
        # However the connection ended: nothing more comes, and nobody is to wait for it.
        running.add_done_callback(lambda _: self._session.give_up("the client was closed"))
        self._tasks = [running, asyncio.create_task(self._watch_over())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ask for nothing more, wait for the open requests as long as the drain's time allows, and leave."""
        self._closing.set()
        self._link.stop(0 if error else self.settings.client.drain_timeout_ms / 1000)
        await asyncio.gather(*self._tasks)

    async def _watch_over(self) -> None:
        """End requests whose deadline has passed, and give all up when there has been no processor for too long."""
        patience = self.settings.client.resume_timeout_ms
        while not await self._clock.wait(self._closing, self.settings.bus.heartbeat_interval_ms / 1000):
            self._session.end_overdue(self._clock.unix_ms())
            lost_since = self._session.lost_since
            if lost_since is not None and self._clock.now() - lost_since >= patience / 1000:
                self._session.give_up(f"no processor answered for {patience} ms")

    def generate(self, generate: Generate) -> RequestTokens:
        """Ask for a new request; a key is drawn where it has none. Its errors are raised by what is returned.

        What it may take, `deadline_ms`, counts from now, whatever happens to processors and connections.
        """
        if not generate.request_key:
            generate.request_key = _drawn()
        self._check_room(generate.request_key)
        if generate.deadline_ms:
            moment = self._clock.unix_ms() + generate.deadline_ms
            timed = Generate()
            timed.CopyFrom(generate)
            timed.deadline_unix_ms = min(generate.deadline_unix_ms or moment, moment)
            generate = timed
        tokens = self._session.open(generate)
        self._link.wake()
        return tokens

    def resume(
        self, key: int, position: int, *, include_drafts: bool = False, deadline_unix_ms: int = 0
    ) -> RequestTokens:
        """Ask for the rest of a request that another client, or an earlier life of this one, began.

        The moment at which it ends at the latest is in milliseconds since 1970-01-01 UTC; 0: as its processor allows.
        """
        self._check_room(key)
        tokens = self._session.resume(key, position, include_drafts=include_drafts, deadline_unix_ms=deadline_unix_ms)
        self._link.wake()
        return tokens

    def abort(self, key: int) -> None:
        """Ask for a request's end; tokens on their way still come."""
        self._session.abort(key)
        self._link.wake()

    async def status(self, *, timeout_seconds: float = 1.0) -> ProcessorStatus:
        """Return how the processor and its workers do, at most a tenth of a second old.

        Raises a TimeoutError if no processor answers in time.
        """
        status = self._session.ask_status()
        self._link.wake()
        async with asyncio.timeout(timeout_seconds):
            return await asyncio.shield(status)

    async def watch(
        self, worker_id: str = "", *, most: int = 1024
    ) -> AsyncGenerator[WatchedStream | WatchedItem, None]:
        """Yield a worker's items as it published them, or every worker's; what is not taken in time is left out."""
        waiting: asyncio.Queue[WatchedStream | WatchedItem] = asyncio.Queue(most)

        def _take(frame: ServerFrame, payload: bytes) -> None:
            if not waiting.full():
                is_item = frame.WhichOneof("body") == "watched_item"
                waiting.put_nowait(WatchedItem(frame.watched_item, payload) if is_item else frame.watched_stream)

        before, self._session.on_watched = self._session.on_watched, _take
        self._session.watch(worker_id)
        self._link.wake()
        try:
            while True:
                yield await waiting.get()
        finally:
            self._session.on_watched = before

    async def outputs(self, *, most: int = 64) -> AsyncGenerator[tuple[LogprobBatch, LogprobBatch | None], None]:
        """Yield this client's rows of each step as columns, each row once, and what was drafted for them.

        While this runs the rows of all requests come from here alone; what `generate` returned says how its request
        ends. While more than `most` wait to be taken, nothing more is confirmed, so the processor stops sending.
        """
        waiting: deque[tuple[LogprobBatch, LogprobBatch | None]] = deque()
        arrived = asyncio.Event()

        def _take(target: LogprobBatch, draft: LogprobBatch | None) -> None:
            waiting.append((target, draft))
            self._session.is_paused = len(waiting) > most
            arrived.set()

        before, self._session.on_outputs = self._session.on_outputs, _take
        try:
            while True:
                while waiting:
                    outputs = waiting.popleft()
                    if len(waiting) <= most:
                        self._go_on()
                    yield outputs
                arrived.clear()
                await arrived.wait()
        finally:  # who takes outputs no longer must not keep those of others back
            self._session.on_outputs = before
            self._go_on()

    def _go_on(self) -> None:
        if self._session.is_paused:
            self._session.is_paused = False
            self._link.wake()

    def _check_room(self, key: int) -> None:
        most = self.settings.client.max_requests
        if key in self._session.requests:
            raise RequestFailedError(
                RequestError(
                    request_key=key,
                    code=ErrorCode.ERROR_CODE_DUPLICATE_REQUEST,
                    message="this client has an open request with that key",
                )
            )
        if len(self._session.requests) >= most:
            message = f"client.max_requests: at most {most}, got {most + 1}"
            raise RequestFailedError(
                RequestError(request_key=key, code=ErrorCode.ERROR_CODE_OVERLOADED, message=message)
            )


def _drawn() -> int:
    """Return a number that nobody else draws."""
    return secrets.randbits(64) or 1
