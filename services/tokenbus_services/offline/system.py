"""EmbeddedSystem: a processor, a worker with its engine, and a client in this process, on a thread of their own."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from tokenbus_services.bus.memory import MemoryTransport
from tokenbus_services.client import Client
from tokenbus_services.offline.call import Call
from tokenbus_services.offline.collector import Collector
from tokenbus_services.offline.requests import Requests
from tokenbus_services.processor import Processor
from tokenbus_services.settings import Settings, SettingsError
from tokenbus_services.terminal import Progress
from tokenbus_services.worker import Engine, EngineBrokenError
from tokenbus_services.worker.run import serve_engine

_STALL_MS, _DAY_MS = 60_000, 86_400_000
_CLOSE_SECONDS = 30.0
_ERRORS_SECONDS = 1.0
"""How long the errors of requests whose engine broke may be on their way."""


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
        ended: Future[Collector] = Future()
        try:
            self._hand_over(requests, shows_progress, ended)
            return ended.result()
        except BaseException:
            ended.cancel()
            raise

    def stop(self) -> None:
        """Begin to end it; any thread may call this."""
        self._is_stopped = True  # seen by a thread that has no loop yet
        with contextlib.suppress(RuntimeError):  # it has ended
            self._call_on_loop(self._stopping.set)

    def close(self) -> None:
        """End it: abort what runs, and close the engine."""
        self.stop()
        self._thread.join(_CLOSE_SECONDS)

    def _hand_over(self, requests: Requests, shows_progress: bool, ended: Future[Collector]) -> None:  # noqa: FBT001
        with self._door:
            if self._is_over:
                raise self._end()
            self._call_on_loop(self._begin, requests, shows_progress, ended)

    def _call_on_loop(self, function: Callable[..., object], *arguments: object) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(function, *arguments)

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
        self._take_no_more()
        await asyncio.sleep(0)  # a call that was made before begins, and ends
        if not self._ready.done():
            self._ready.set_exception(self._failure or self._end())

    def _take_no_more(self) -> None:
        with self._door:
            self._is_over = True

    async def _serve(self) -> None:
        transport, stop_worker, started = MemoryTransport(self._settings.bus), asyncio.Event(), asyncio.Event()
        made: list[Engine] = []

        def make() -> Engine:
            made.append(self._make(self._settings))
            return made[0]

        async with Processor(self._settings, transport=transport):
            working = asyncio.create_task(
                serve_engine(
                    *(make, self._settings, stop_worker),
                    name=self._name,
                    transport=transport,
                    started=started.set,
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
        self._take_no_more()
        if (call := self._call) is not None:
            if working.done():
                await asyncio.wait({call}, timeout=_ERRORS_SECONDS)
            call.cancel()
            await asyncio.wait({call})

    def _begin(self, requests: Requests, shows_progress: bool, ended: Future[Collector]) -> None:  # noqa: FBT001
        """Begin a call, whose end a future gets; it is cancelled with the future."""
        call = asyncio.create_task(self._generate(requests, Progress() if shows_progress else None))

        def end(_: object) -> None:
            if not ended.set_running_or_notify_cancel():
                return
            error = self._end() if call.cancelled() else call.exception()
            if error is not None:
                ended.set_exception(error)
            else:
                ended.set_result(call.result())

        call.add_done_callback(end)
        ended.add_done_callback(lambda _: self._call_on_loop(call.cancel))

    async def _generate(self, requests: Requests, progress: Progress | None) -> Collector:
        async with self._one_call:
            if self._is_over:
                raise self._end()
            self._call = asyncio.current_task()
            try:
                return await Call(self._client, requests, self._window, progress).run()
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
