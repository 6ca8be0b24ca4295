"""EmbeddedSystem: a processor, a worker with its engine, and a client in this process, on a thread of their own."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any

from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.control_pb2 import EngineState
from tokenbus_contracts.generated.request_pb2 import ErrorCode
from tokenbus_services.bus.memory import MemoryTransport
from tokenbus_services.client import Client, Operator, RequestEnd, RequestFailedError, StepRows, Stream
from tokenbus_services.client.operator import States
from tokenbus_services.delivery.errors import request_error
from tokenbus_services.offline.outputs import Collector
from tokenbus_services.offline.requests import Requests
from tokenbus_services.processor import Processor
from tokenbus_services.settings import Settings, SettingsError
from tokenbus_services.terminal import Progress
from tokenbus_services.worker import Engine, EngineBrokenError
from tokenbus_services.worker.run import serve_engine

_STALL_MS, _DAY_MS = 60_000, 86_400_000
_FINISHED = frozenset({RowStatus.FINISHED_STOP, RowStatus.FINISHED_LENGTH})
_CLOSE_SECONDS = 30.0
_ERRORS_SECONDS = 1.0
"""How long the errors of requests whose engine broke may be on their way."""


class Call:
    """Sends requests by a client, and collects their rows."""

    def __init__(self, client: Client, requests: Requests, window: int, progress: Progress | None) -> None:
        self._client = client
        self._requests = requests
        self._window = window
        self._progress = progress
        self._begin = time.monotonic()
        self._sent = 0
        self._open: set[int] = set()
        """The ids of the requests in flight."""
        self._collector = Collector(requests.first_id, len(requests))
        self._task: asyncio.Task[object] | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """End it, or do not let it begin."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> Collector:
        """Return the rows once all requests have ended; raises RequestFailedError for the first that fails.

        Requests in flight are aborted when it raises, and when it is cancelled; it ends once they have ended.
        """
        self._task = asyncio.current_task()
        if self._is_cancelled:
            raise asyncio.CancelledError
        async with self._client.steps() as steps:
            try:
                while self._sent < len(self._requests) or self._open:
                    while self._sent < len(self._requests) and len(self._open) < self._window:
                        self._open.add(self._client.submit(self._requests.make(self._sent)))
                        self._sent += 1
                    self._take(await anext(steps))
                    if self._progress is not None:
                        self._progress.show(self._shown)
            finally:
                if self._progress is not None:
                    self._progress.clear()
                await self._abort(steps)
        return self._collector

    def _take(self, item: StepRows | RequestEnd) -> None:
        if isinstance(item, StepRows):
            self._collector.add(item.target)
            return
        self._open.remove(item.request_id)
        if item.error is not None:
            raise self._requests.failure(item.error)
        if item.status not in _FINISHED:
            why = f"its engine ended it: {item.status.name if item.status else 'no status'}"
            error = request_error(item.request_id, ErrorCode.ERROR_CODE_ENGINE, why)
            raise self._requests.failure(RequestFailedError(error))
        self._collector.end(item, item.status)

    async def _abort(self, steps: Stream[StepRows | RequestEnd]) -> None:
        """Abort the requests in flight, and wait for their ends: until then they count as the worker's."""
        for request_id in self._open:
            self._client.abort(request_id)
        # The processor itself ends a request whose worker does not, after the first of the two.
        settings = self._client.settings
        most = (settings.processor.abort_timeout_ms + settings.bus.heartbeat_interval_ms) / 1000
        with contextlib.suppress(TimeoutError, StopAsyncIteration):
            async with asyncio.timeout(most):
                while self._open:
                    item = await anext(steps)
                    if isinstance(item, RequestEnd):
                        self._open.discard(item.request_id)

    def _shown(self) -> str:
        ended, tokens = self._sent - len(self._open), self._collector.tokens
        seconds = max(time.monotonic() - self._begin, 1e-3)
        return f"{ended:,} of {len(self._requests):,} requests, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s"


class EmbeddedSystem:
    """Runs from when it is made until it is closed.

    Its event loop runs in a thread of its own, so that it may be used where one runs already, as in a notebook. Its
    threads are daemons: a process may end without closing it.
    """

    def __init__(self, make: Callable[[Settings], Engine], settings: Settings, name: str) -> None:
        """Start the system, and block until the engine is ready; raises what `make` raised.

        The thread that steps the engine calls `make`; `name` is the engine's in the log.
        """
        self._make = make
        self._settings = _embedded(settings)
        self._name = name
        self._window = _window(settings)
        self._ready: Future[tuple[Engine, Client]] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopped = False
        self._failure: BaseException | None = None
        self._stopping = asyncio.Event()
        self._one_call = asyncio.Lock()
        self._call: asyncio.Task[Collector] | None = None
        """The call that is being answered; others wait for its end."""
        self._door = threading.Lock()
        self._is_over = False
        """Whether no further call can be made; changed with the lock held."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="tokenbus-llm", daemon=True)
        # Wherever in here this thread is interrupted, what was started ends.
        try:
            self._thread.start()
            self.engine, self._client = self._ready.result()
        except BaseException:
            self.stop()
            raise

    def generate(self, requests: Requests, *, shows_progress: bool) -> Collector:
        """Send requests, and return their rows once all have ended; a call waits for the one before.

        When a request fails, or this thread is interrupted, the others are aborted.
        """
        # Made first: wherever in here this thread is interrupted, the call is known.
        call = Call(self._client, requests, self._window, Progress() if shows_progress else None)
        try:
            return self._begin(call).result()
        except CancelledError:
            raise self._end() from None
        except BaseException:
            self._call_on_loop(call.cancel)
            raise

    def operate(self, command: Callable[[Operator], Coroutine[Any, Any, States]]) -> EngineState:
        """Have an operator tell the engine something, between two steps, and return how the engine is then."""
        with self._door:
            if self._is_over or self._loop is None:
                raise self._end()
            done = asyncio.run_coroutine_threadsafe(command(Operator(self._client)), self._loop)
        (state,) = done.result().values()
        return state

    def stop(self) -> None:
        """Begin to end it; any thread may call this."""
        self._is_stopped = True  # seen by a thread that has no loop yet
        self._call_on_loop(self._stopping.set)

    def close(self) -> None:
        """End it: abort what runs, and close the engine."""
        self.stop()
        self._thread.join(_CLOSE_SECONDS)

    def _begin(self, call: Call) -> Future[Collector]:
        with self._door:
            if self._is_over or self._loop is None:
                raise self._end()
            return asyncio.run_coroutine_threadsafe(self._answer(call), self._loop)

    def _call_on_loop(self, function: Callable[[], object]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(function)

    def _end(self) -> Exception:
        """Return why no call can be made."""
        if isinstance(self._failure, EngineBrokenError):
            return EngineBrokenError(str(self._failure))
        return RuntimeError("this LLM is closed")

    # On its own event loop.

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._is_stopped:
            self._stopping.set()
        try:
            await self._serve()
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            self._failure = error
        with self._door:
            self._is_over = True
        await asyncio.sleep(0)  # a call that was made before begins, and ends
        if not self._ready.done():
            self._ready.set_exception(self._failure or self._end())

    async def _serve(self) -> None:
        transport, stop_worker, started = MemoryTransport(self._settings.bus), asyncio.Event(), asyncio.Event()
        made: list[Engine] = []

        def make() -> Engine:
            made.append(self._make(self._settings))
            return made[0]

        async with Processor(self._settings, transport=transport):
            working = asyncio.create_task(
                serve_engine(
                    make, self._settings, stop_worker, name=self._name, transport=transport, started=started.set
                )
            )
            starting, stopping = asyncio.create_task(started.wait()), asyncio.create_task(self._stopping.wait())
            try:
                await asyncio.wait({working, stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
                if started.is_set():
                    async with Client(self._settings, transport=transport) as client:
                        self._ready.set_result((made[0], client))
                        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
                        await self._end_calls(working)
            finally:
                starting.cancel()
                stopping.cancel()
                stop_worker.set()
                if not started.is_set():
                    working.cancel()  # the engine is closed as soon as it is made
            await working

    async def _end_calls(self, working: asyncio.Task[None]) -> None:
        """Let no further call be made, and end the one that is; where the engine broke, its requests fail first."""
        if working.done():
            self._failure = working.exception()
        with self._door:
            self._is_over = True
        if (call := self._call) is not None:
            if working.done():
                await asyncio.wait({call}, timeout=_ERRORS_SECONDS)
            call.cancel()
            await asyncio.wait({call})

    async def _answer(self, call: Call) -> Collector:
        async with self._one_call:
            if self._is_over:
                raise self._end()
            self._call = asyncio.current_task()
            try:
                return await call.run()
            finally:
                self._call = None


def _embedded(settings: Settings) -> Settings:
    """Return settings for a system within a process: no address, no key, no log, no end of requests by time."""
    bus = replace(
        settings.bus,
        workers_address="memory://workers",
        clients_address="memory://clients",
        # An engine that keeps Python to itself for a while, as one that is compiled, is no peer that is lost.
        heartbeat_timeout_ms=max(_STALL_MS, settings.bus.heartbeat_timeout_ms),
    )
    worker = replace(settings.worker, role="mixed", tp_rank=0, dp_rank=0, policy="block", checksum=False)
    processor = replace(settings.processor, request_timeout_ms=_DAY_MS, drain_timeout_ms=0)
    client = replace(settings.client, drain_timeout_ms=0)
    log = replace(settings.durable_log, address="")
    return replace(settings, bus=bus, worker=worker, processor=processor, client=client, durable_log=log)


def _window(settings: Settings) -> int:
    """Return how many requests may be in flight: as many as worker, processor and client all take."""
    most = settings.worker.max_requests
    if not most:
        raise SettingsError("worker.max_requests", "at least 1 here", most)
    processor = settings.processor
    return min(most, settings.client.max_requests, processor.requests_per_peer, processor.max_requests)
