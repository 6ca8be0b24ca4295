"""tokenbus worker: an engine in a process of its own, until it is told to stop."""

import argparse
import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from functools import partial

from tokenbus_contracts.generated.request_pb2 import ErrorCode
from tokenbus_services.bus import Transport, transport_for
from tokenbus_services.cli.configuration import declare_settings, faults_told, load_settings
from tokenbus_services.cli.engines import DEFAULT_ENGINE, ENGINES, made
from tokenbus_services.cli.errors import CommandError
from tokenbus_services.cli.pace import Pace
from tokenbus_services.cli.signals import stop_on_signals
from tokenbus_services.clock import SystemClock
from tokenbus_services.descriptors import open_files_for
from tokenbus_services.logs import logger
from tokenbus_services.metrics import serve_publisher
from tokenbus_services.settings import Settings
from tokenbus_services.worker import Engine, NotRunningError, Publisher, RetentionFullError
from tokenbus_services.worker.emitter import Emitter
from tokenbus_services.worker.handoff import HandoffReceiver, HandoffSender
from tokenbus_services.worker.handshake import HandoffPoint
from tokenbus_services.worker.outbox import Outbox
from tokenbus_services.worker.service import EngineLoop

_DESCRIPTION = """\
Run an engine, take requests from the processor and publish every step. The processor need not be there yet: the worker
finds it, and finds it again. Once the engine is there it logs "worker started", and "connected" when a processor took
it. After SIGTERM or SIGINT it takes no new request, finishes those it has as fast as it can, waits until all is
acknowledged, and leaves with status 0; each of the two waits is bounded by worker.drain_timeout_ms. A second signal
ends it at once.

examples:
  tokenbus worker --id worker-1
  tokenbus worker --id worker-2 --workers-address ipc:///run/tokenbus/workers.sock --steps-per-second 200
  tokenbus worker --role prefill --id prefill-0 --speculate 4
  tokenbus worker --engine paddle --max-running 64
  tokenbus worker --engine synthetic --tokens-per-step 4 --drafts --parts 2
  tokenbus worker --settings tokenbus.toml --set worker.policy=shed

settings that matter: bus.workers_address, bus.key_file and bus.server_key (docs/security.md), worker.id (one for each
live worker), worker.role and worker.handoff_* (a prefill worker hands requests off to a decode worker, at its address),
worker.max_requests, worker.retention_* and worker.policy (what happens when tokens are not taken), limits.*,
worker.metrics_address (empty: no metrics are served).
"""
_log = logger("worker")


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options, those of every engine too."""
    parser.description = _DESCRIPTION
    engines = "; ".join(f"{name}: {kind.summary}" for name, kind in ENGINES.items())
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=DEFAULT_ENGINE,
        help=f"what computes the tokens; {DEFAULT_ENGINE} unless told otherwise. {engines}",
    )
    parser.add_argument(
        "--steps-per-second",
        type=_rate,
        default=0.0,
        metavar="X",
        help="the most steps that begin in a second; 0, the default: as many as the engine can",
    )
    for kind in ENGINES.values():
        kind.declare(parser)
    declare_settings(
        parser,
        {
            "--id": "worker.id",
            "--role": "worker.role",
            "--model": "worker.model",
            "--max-requests": "worker.max_requests",
            "--workers-address": "bus.workers_address",
            "--metrics-address": "worker.metrics_address",
        },
    )


def run(options: argparse.Namespace) -> int:
    """Run a worker until a signal."""
    settings = load_settings(options)
    log_open_files = open_files_for(settings)
    engine = made(options, settings)
    with faults_told():
        asyncio.run(_run(settings, engine, options, log_open_files))
    return 0


async def _run(settings: Settings, engine: Engine, options: argparse.Namespace, started: Callable[[], None]) -> None:
    with stop_on_signals() as stop:
        pace, name = options.steps_per_second, options.engine
        await work(settings, engine, stop, steps_per_second=pace, name=name, started=started)


async def work(  # noqa: PLR0913 - each but the first three is given by name
    settings: Settings,
    engine: Engine,
    stop: asyncio.Event,
    *,
    steps_per_second: float = 0,
    name: str = "engine",
    transport: Transport | None = None,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Run an engine's loop in a thread, and everything else on this event loop, until told to stop and drained.

    `started` is called once the worker has what it needs.
    """
    told = threading.Event()
    pace = Pace(steps_per_second, time.monotonic, told.wait) if steps_per_second else None
    drain_seconds = settings.worker.drain_timeout_ms / 1000
    deadline = math.inf

    def loop() -> None:
        """Serve until told to stop, then finish; what the engine said last goes out, whyever this ends."""
        # An event that cannot be published any more is one that nobody can be told of.
        with contextlib.suppress(NotRunningError):
            try:
                engine_loop.serve(told, pace)
                engine_loop.finish(deadline - time.monotonic(), time.monotonic)
            finally:
                outbox.flush(drain_seconds)

    transport = transport or transport_for(settings.bus)
    async with AsyncExitStack() as stack:
        receiver = None
        if settings.worker.role == "decode":
            receiver = await stack.enter_async_context(HandoffReceiver(settings, transport))
        publisher = Publisher(
            settings,
            vocabulary_size=engine.vocabulary_size,
            transport=transport,
            handoff=HandoffPoint() if receiver is None else receiver.point,
        )
        sender = HandoffSender(
            settings, transport, SystemClock(), publisher.counts, partial(_hand_off_failed, publisher)
        )
        emitter = Emitter(publisher, engine.vocabulary_size, sender if settings.worker.role == "prefill" else None)
        stack.enter_context(closing(engine))
        looping: list[asyncio.Task[None]] = []
        # Both after the publisher's end, which wakes a thread that waits for room in retention.
        stack.push_async_callback(_ended, looping)
        outbox = stack.enter_context(Outbox(emitter, settings.worker.outbox))
        engine_loop = EngineLoop(engine, emitter, outbox)
        stack.enter_context(serve_publisher(publisher))
        await stack.enter_async_context(publisher)
        # It leaves before the publisher: what nobody took over is still to be told.
        await stack.enter_async_context(sender)
        if receiver is not None:
            receiver.serve(publisher)
        _tell_start(publisher, name)
        started()
        looping.append(asyncio.create_task(asyncio.to_thread(loop)))
        await _either(looping[0], stop)
        deadline = time.monotonic() + drain_seconds
        publisher.take_no_more()
        told.set()
        await asyncio.wait(looping, timeout=drain_seconds)
    _raise_failure(looping[0])
    _log.info("worker stopped", worker=settings.worker.id)


def _tell_start(publisher: Publisher, name: str) -> None:
    address = publisher.settings.bus.workers_address
    _log.info("worker started", worker=publisher.worker_id, epoch=publisher.epoch, engine=name, processor=address)


async def _either(looping: "asyncio.Task[None]", stop: asyncio.Event) -> None:
    """Wait for a stop, or for the loop's own end."""
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([looping, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()


async def _ended(tasks: "list[asyncio.Task[None]]") -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def _hand_off_failed(publisher: Publisher, key: int, why: str) -> None:
    with contextlib.suppress(NotRunningError, RetentionFullError):  # then the request is named in a gap
        publisher.failed_request(key, ErrorCode.ERROR_CODE_HANDOFF, why)


def _raise_failure(looping: "asyncio.Task[None]") -> None:
    error = looping.exception()
    if error is not None:
        _log.error("the engine's loop failed", exc_info=error)
        raise CommandError(f"the engine's loop failed: {type(error).__name__}: {error}")


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise argparse.ArgumentTypeError(f"a number of at least 0, got {text!r}")
    return rate
