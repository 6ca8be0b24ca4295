"""Supervisor: starts a gateway's processes, replaces those that die or stand still, and answers for all of them."""

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tokenbus_services.bus import AddressError
from tokenbus_services.gateway.channel import Channel
from tokenbus_services.gateway.group import SummedMetrics, joined_health
from tokenbus_services.gateway.server import LAST_SECONDS, listen_for_clients
from tokenbus_services.gateway.tallies import SharedTallies
from tokenbus_services.logs import logger
from tokenbus_services.metrics.health import Health, LoopWatch, stalled
from tokenbus_services.metrics.server import MetricsServer
from tokenbus_services.settings import Settings, SettingsError
from tokenbus_services.settings.errors import Shown

_log = logger("gateway")
_MODULE = "tokenbus_services.gateway.member"
_FIRST_DELAY, _MOST_DELAY = 0.5, 30.0
_TICK_SECONDS = 1.0
_MOST_MISSED = 20
"""After so many ticks without a report a process is killed: it stands still, however busy the machine is.

Ticks are counted, not seconds: those in which the supervisor itself stood still are none.
"""
_STEADY_SECONDS = 60.0
"""A process that served for so long is started again with the first delay."""
_GRACE_SECONDS = 5.0


class _Process:
    """One process that serves: its last report, and how to reach it."""

    def __init__(self, process: asyncio.subprocess.Process, channel: Channel) -> None:
        self.process = process
        self.channel = channel
        self.began = self.reported_at = time.monotonic()
        self.health: Health | None = None
        """None until it serves."""
        self.fault: SettingsError | AddressError | None = None
        """What keeps it from its start."""
        self.missed = 0
        """Ticks since its last report."""

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Supervisor(Collector):
    """Runs gateway.processes processes that share one listening socket."""

    def __init__(self, settings: Settings, listening: socket.socket, address: str) -> None:
        """Serve with the socket that clients connect to, at `address`."""
        self.address = address
        self.processes: dict[int, _Process] = {}
        """The processes that run, by place."""
        self._settings = settings
        self._listening = listening
        self._tallies = SharedTallies()
        self._keepers: list[asyncio.Task[None]] = []
        self._is_stopping = asyncio.Event()
        self._metrics = SummedMetrics()
        loop = asyncio.get_running_loop()
        self.watch = LoopWatch(lambda: loop, time.monotonic)
        self._collected: list[Metric] = []
        self._health = Health((), {"service": "gateway"})

    async def start(self) -> None:
        """Start all processes; raises what keeps one of them from its start."""
        count = self._settings.gateway.processes
        started: list[asyncio.Future[_Process]] = [asyncio.Future() for _ in range(count)]
        self._keepers = [asyncio.create_task(self._keep(place, first)) for place, first in enumerate(started)]
        self._keepers.append(asyncio.create_task(self._tick()))
        for keeper in self._keepers:
            keeper.add_done_callback(_log_failure)
        for process in await asyncio.gather(*started):
            if process.fault is not None:
                raise process.fault
            if process.health is None:
                limit = "processes that start; the log says why one did not"
                raise SettingsError("gateway.processes", limit, count)
        self._refresh()

    async def stop(self) -> None:
        """Refuse new connections at once, let all processes drain and leave, and kill those that do not."""
        self._is_stopping.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # for all processes that share it
        left = list(self.processes.values())
        for each in left:
            each.signal(signal.SIGTERM)
        waiting = [*self._keepers, *(asyncio.ensure_future(each.process.wait()) for each in left)]
        settings = self._settings
        milliseconds = settings.gateway.drain_timeout_ms + settings.client.drain_timeout_ms + settings.bus.linger_ms
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=milliseconds / 1000 + LAST_SECONDS + _GRACE_SECONDS)
            if late:
                alive = [each for each in self.processes.values() if each.process.returncode is None]
                _log.error("processes did not leave and are killed", count=len(alive))
                for each in alive:
                    each.signal(signal.SIGKILL)
                await asyncio.wait(waiting)
        for each in left:
            await each.channel.close()
        self._tallies.close()

    # Processes.

    async def _keep(self, place: int, first: "asyncio.Future[_Process]") -> None:
        """Run the process of a place, again whenever it ends; `first` is resolved when the first serves or ends."""
        delay = _FIRST_DELAY
        while not self._is_stopping.is_set():
            try:
                process = await self._start(place)
            except OSError as error:  # too many open files or processes, or no memory
                if not first.done():
                    first.set_exception(error)
                    return
                _log.error(
                    "a process of the gateway cannot be started", process=place, reason=str(error), again_in=delay
                )
            else:
                status = await self._run(place, process, first)
                if not first.done():
                    first.set_result(process)
                    return
                if self._is_stopping.is_set():
                    return
                if time.monotonic() - process.began > _STEADY_SECONDS:
                    delay = _FIRST_DELAY
                self._metrics.lost(place)
                reason = None if process.fault is None else str(process.fault)
                _log.error(
                    "a process of the gateway ended", process=place, status=status, reason=reason, again_in=delay
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._is_stopping.wait()
            delay = min(_MOST_DELAY, 2 * delay)

    async def _start(self, place: int) -> _Process:
        ours, its_end = socket.socketpair()
        with its_end:
            channel = await Channel.over(ours)
            inherited = its_end.fileno(), self._listening.fileno(), self._tallies.descriptor
            try:
                process = await asyncio.create_subprocess_exec(
                    # -P: nothing of the folder that it is started in takes the place of a module.
                    *(sys.executable, "-P", "-m", _MODULE, *map(str, inherited)),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=inherited,
                )
            except BaseException:
                await channel.close()
                raise
        channel.send(place=place, address=self.address, settings=self._settings.describe())
        return _Process(process, channel)

    async def _run(self, place: int, process: _Process, first: "asyncio.Future[_Process]") -> int:
        """Take a process's reports until it ends; return its exit status."""
        self.processes[place] = process
        if self._is_stopping.is_set():
            process.signal(signal.SIGTERM)
        async for message in process.channel.messages():
            if "fault" in message:
                process.fault = _fault_of(*message["fault"])
                continue
            process.missed, process.reported_at = 0, time.monotonic()
            process.health = Health(tuple(message["problems"]), message["facts"])
            if not first.done():
                first.set_result(process)
            self._metrics.take(place, message["metrics"])
            if message["asks"]:
                health = self._joined_health()
                page = generate_latest(self._metrics).decode()
                process.channel.send(metrics=page, problems=health.problems, facts=health.facts)
        status = await process.process.wait()
        await process.channel.close()
        del self.processes[place]
        self._tallies.forget(place)
        return status

    async def _tick(self) -> None:
        """Kill processes that stand still, and keep what the metrics' own address shows."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_SECONDS):
                    await self._is_stopping.wait()
                    return
            for place, each in self.processes.items():
                each.missed += each.health is not None  # a process that starts may load large files for long
                if each.missed > _MOST_MISSED:
                    _log.error("a process of the gateway answers nothing and is killed", process=place)
                    each.signal(signal.SIGKILL)
            self._refresh()

    # Answers.

    def _refresh(self) -> None:
        self._collected, self._health = list(self._metrics.collect()), self._joined_health()

    def _joined_health(self) -> Health:
        now = time.monotonic()
        serving = {place: each for place, each in self.processes.items() if each.health is not None}
        silent = {place: now - each.reported_at for place, each in serving.items()}
        healths = {place: each.health for place, each in serving.items() if each.health is not None}
        # A process reports once a second.
        health = joined_health(healths, silent, self._settings.metrics.stall_timeout_ms + round(1000 * _TICK_SECONDS))
        if any(keeper.done() for keeper in self._keepers):
            health = replace(health, problems=(*health.problems, "its supervisor has failed: restart the gateway"))
        return health

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all processes, as of the last second; any thread may call it."""
        return iter(self._collected)

    def health(self) -> Health:
        """Return the health of all processes, as of the last second; any thread may call it."""
        problems = stalled(self.watch, self._settings.metrics.stall_timeout_ms)
        return replace(self._health, problems=(*self._health.problems, *problems))


def _fault_of(name: str, reason: str, *more: str) -> SettingsError | AddressError:
    """Return what keeps a process from its start, as it reports it: an address with a reason, or a setting."""
    if not more:
        return AddressError(name, reason)
    actual, where = more
    return SettingsError(name, reason, Shown(actual), where)


def _log_failure(keeper: "asyncio.Task[None]") -> None:
    error = None if keeper.cancelled() else keeper.exception()
    if error is not None:
        _log.error("the supervisor failed: restart the gateway", exc_info=error)


@contextlib.asynccontextmanager
async def serve_processes(settings: Settings) -> AsyncIterator[Supervisor]:
    """Serve HTTP with gateway.processes processes for as long as `async with` lasts; then drain them.

    Raises an AddressError if an address cannot be used, a SettingsError for unsafe settings.
    """
    listening, address = await listen_for_clients(settings.gateway)
    with contextlib.closing(listening):
        supervisor = Supervisor(settings, listening, address)
        try:
            given = settings.gateway.metrics_address
            server = MetricsServer("gateway.metrics_address", given, supervisor, supervisor.health, supervisor.watch)
            await supervisor.start()
            scheme = "https" if settings.gateway.tls_certificate else "http"
            async with server.running():
                values = {"tokenizer": settings.gateway.tokenizer, "processes": settings.gateway.processes}
                _log.info("listening", address=f"{scheme}://{address}", **values)
                yield supervisor
        finally:
            await supervisor.stop()
    _log.info("gateway stopped")
