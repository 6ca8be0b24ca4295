"""run_engine: runs an engine as a worker, as `tokenbus worker` does."""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, TypeVar

from tokenbus.bus import Transport, transport_for
from tokenbus.clock import Clock
from tokenbus.logs import configure, logger
from tokenbus.metrics.publisher import serve_publisher
from tokenbus.open_files import open_files_for
from tokenbus.settings import Settings, SettingsError
from tokenbus.signals import stop_on_signals
from tokenbus.worker.engine import Engine, EngineBrokenError, EngineDescription, engine_of
from tokenbus.worker.engine_loop import EngineLoop
from tokenbus.worker.engine_publisher import EnginePublisher
from tokenbus.worker.errors import NotRunningError
from tokenbus.worker.process.client import PublisherProcess
from tokenbus.worker.publisher import Publisher
from tokenbus.worker.publisher_thread import PublisherThread
from tokenbus.worker.publishing import PublisherClient

_POLL_SECONDS = 0.05
_log = logger("worker")
T = TypeVar("T")


def run_engine(
    engine: Engine | Callable[[], Engine],
    settings: Settings | None = None,
    *,
    name: str = "engine",
    steps_per_second: float = 0,
    stop: threading.Event | None = None,
) -> None:
    """Run an engine as a worker: take requests, publish every step, serve metrics. Block until the worker has stopped.

    The processor need not be running yet. After SIGTERM or SIGINT the worker takes no new requests. The worker then
    finishes its open requests and waits for all acks, each for at most `worker.drain_timeout_ms`. A second signal, or
    any signal while the engine is being created, ends the process. A separate thread calls all methods of the engine,
    with `close` as the last call.

    Args:
        engine: An object with the members of `Engine`, or a function that creates an engine on the engine's thread. An
            engine on a GPU needs such a function, whose exceptions are raised here.
        settings: Settings of the worker and of logging. By default, the environment and the file in TOKENBUS_SETTINGS
            supply the settings.
        name: The engine's name in the log.
        steps_per_second: Maximum number of steps that begin in a second, or 0 for no limit.
        stop: Event that stops the worker. With an event, `run_engine` handles no signals and may run in any thread.

    Raises:
        EngineBrokenError: The engine's loop failed with `__cause__`, and all requests ended with an error.
        SettingsError: A setting cannot be used.
        AddressError: The metrics address cannot be used.
        NotRunningError: The publisher's process cannot start.
        TypeError: The argument `engine` does not provide an engine.

    Example:
        import tokenbus

        tokenbus.run_engine(MyEngine())
    """
    settings = settings or Settings.load()
    configure(settings.log)
    log_open_files = open_files_for(settings)

    async def serve() -> None:
        async with _stopping(stop) as stopping:
            await serve_engine(
                thread, settings, stopping, name=name, steps_per_second=steps_per_second, started=log_open_files
            )

    with EngineThread(engine) as thread:
        thread.made.result()
        asyncio.run(serve())


async def serve_engine(  # noqa: PLR0913 - each but the first three is given by name
    thread: "EngineThread",
    settings: Settings,
    stop: asyncio.Event,
    *,
    name: str = "engine",
    steps_per_second: float = 0,
    transport: Transport | None = None,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Run the engine that `thread` made, as `run_engine` does, until `stop` is set or the engine's loop ends."""
    engine = thread.made.result()
    stop_loop = threading.Event()
    pace = Pace(steps_per_second, time.monotonic, stop_loop.wait) if steps_per_second else None
    drain_seconds = settings.worker.drain_timeout_ms / 1000
    deadline = math.inf

    def run_loop() -> None:
        with contextlib.suppress(NotRunningError):  # the publisher has stopped
            try:
                engine_loop.serve(stop_loop, pace)
                engine_loop.finish(deadline - time.monotonic(), time.monotonic)
            finally:
                out.flush(drain_seconds)

    settings = _settings_for(engine, settings)
    transport = transport or transport_for(settings.bus, settings.bus.workers_address)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(lambda: asyncio.wrap_future(thread.close()))
        looping: list[asyncio.Future[None]] = []
        # Wait for the loop after the publisher has ended, because the publisher's end wakes a blocked loop.
        stack.push_async_callback(lambda: asyncio.gather(*looping, return_exceptions=True))
        out: PublisherThread | PublisherProcess
        client: PublisherClient
        if settings.worker.publisher == "process":
            process = client = out = PublisherProcess(settings, engine.vocabulary_size, _description_of(engine))
            await asyncio.to_thread(process.__enter__)
            stack.push_async_exit(lambda *error: asyncio.to_thread(process.__exit__, *error))
        else:
            client = engine_publisher(engine, settings, transport)
            out = stack.enter_context(PublisherThread(client, settings.worker.outbox))
            stack.enter_context(serve_publisher(client.publisher))
            await stack.enter_async_context(client.publisher)
        engine_loop = EngineLoop(engine, client, out)
        address = settings.bus.workers_address
        _log.info("worker started", worker=settings.worker.id, epoch=client.epoch, engine=name, processor=address)
        started()
        looping.append(asyncio.wrap_future(thread.run(run_loop)))
        stopping = asyncio.create_task(stop.wait())
        stack.callback(stopping.cancel)
        await asyncio.wait((looping[0], stopping), return_when=asyncio.FIRST_COMPLETED)
        deadline = time.monotonic() + drain_seconds
        client.take_no_more()
        stop_loop.set()
        await asyncio.wait(looping, timeout=drain_seconds)
    error = looping[0].exception()
    if error is not None:
        _log.error("the engine's loop failed", exc_info=error)
        raise EngineBrokenError(f"the engine's loop failed: {type(error).__name__}: {error}") from error
    _log.info("worker stopped", worker=settings.worker.id)


def _settings_for(engine: Engine, settings: Settings) -> Settings:
    """Return the settings with the engine's rank, or raise SettingsError for a role that the engine does not have."""
    if (role := getattr(engine, "role", settings.worker.role)) != settings.worker.role:
        raise SettingsError("worker.role", f"{role}, the role of the engine", settings.worker.role)
    rank = getattr(engine, "dp_rank", settings.worker.dp_rank)
    return replace(settings, worker=replace(settings.worker, dp_rank=rank))


def engine_publisher(
    engine: Engine, settings: Settings, transport: Transport, clock: Clock | None = None
) -> EnginePublisher:
    """Return an engine's publisher; the caller must enter its attribute `publisher` as a context manager."""
    size, description = engine.vocabulary_size, _description_of(engine)
    publisher = Publisher(settings, vocabulary_size=size, description=description, transport=transport, clock=clock)
    return EnginePublisher(publisher, size)


def _description_of(engine: Engine) -> EngineDescription:
    return EngineDescription(
        max_model_tokens=getattr(engine, "max_model_tokens", 0),
        tokenizer_digest=getattr(engine, "tokenizer_digest", 0),
        tokenizer_probes=tuple(getattr(engine, "tokenizer_probes", ())),
        lora_adapters=tuple(getattr(engine, "lora_adapters", ())),
        takes_control=True,
        continues_requests=getattr(engine, "continues_requests", False),
        token_scores=sorted(getattr(engine, "token_scores", ())),
    )


class EngineThread:
    """Creates an engine, runs its loop, and closes the engine at the end of `with`, all on one thread.

    CUDA devices and OpenMP's threads often bind an engine to the thread that creates the engine. The thread is a daemon
    thread, so that an interrupted process need not wait for the engine's creation.
    """

    def __init__(self, engine: Engine | Callable[[], Engine]) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._closed: Future[None] | None = None
        self.made: Future[Engine] = self.run(lambda: engine_of(engine))
        """The engine, or the exception of the function that creates the engine."""

    def __enter__(self) -> "EngineThread":
        threading.Thread(target=self._serve, name="tokenbus-engine", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, call: Callable[[], T]) -> "Future[T]":
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()
        self._calls.put((call, done))
        return done

    def close(self) -> "Future[None]":
        """Close the engine after earlier calls have returned."""
        if self._closed is None:
            self._closed = self.run(self._close)
            self._calls.put(None)
        return self._closed

    def _close(self) -> None:
        if self.made.exception() is None:
            self.made.result().close()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            function, done = call
            try:
                done.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the future raises it
                done.set_exception(error)


class Pace:
    """Limits the number of steps that begin in a second. The loop calls this object before each step."""

    def __init__(self, per_second: float, now: Callable[[], float], wait: Callable[[float], object]) -> None:
        self._period = 1 / per_second
        self._now = now
        self._wait = wait
        self._due = now()

    def __call__(self) -> None:
        now = self._now()
        if now < self._due:
            self._wait(self._due - now)
        # Catch up on at most one late step. Catching up on more steps would cause a burst of steps.
        self._due = max(self._due, now - self._period) + self._period


@asynccontextmanager
async def _stopping(stop: threading.Event | None) -> AsyncIterator[asyncio.Event]:
    if stop is None:
        with stop_on_signals() as stopping:
            yield stopping
        return
    stopping = asyncio.Event()

    async def forward() -> None:
        while not stop.is_set():  # noqa: ASYNC110 - a thread's event wakes no event loop
            await asyncio.sleep(_POLL_SECONDS)
        stopping.set()

    forwarding = asyncio.create_task(forward())
    try:
        yield stopping
    finally:
        forwarding.cancel()
