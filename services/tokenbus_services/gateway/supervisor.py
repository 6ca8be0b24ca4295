"""Supervisor: starts a gateway's processes, replaces those that die or stand still, and answers for all of them."""

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import replace

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tokenbus_services.bus import AddressError
from tokenbus_services.gateway.group import Channel, SummedMetrics, joined_health
from tokenbus_services.gateway.server import LAST_SECONDS, listen_for_clients
from tokenbus_services.gateway.tallies import SharedTallies
from tokenbus_services.logs import logger
from tokenbus_services.metrics.health import Health, LoopWatch, stalled
from tokenbus_services.metrics.server import MetricsServer
from tokenbus_services.settings import Settings, SettingsError
from tokenbus_services.settings.errors import Shown

_log = logger("gateway")
_MODULE = "tokenbus_services.gateway.member"
_TICK_SECONDS = 1.0
_RESTART_SECONDS = 2.0
"""How long after its end a process is started again."""
_MOST_MISSED = 20
"""After so many ticks without a report a process is killed: it stands still, however busy the machine is.

Ticks are counted, not seconds: those in which the supervisor itself stood still are none.
"""
_GRACE_SECONDS = 5.0


class _Process:
    """One process that serves: its last report, and how to reach it."""

    def __init__(self, process: asyncio.subprocess.Process, channel: Channel) -> None:
        self.process = process
        self.channel = channel
        self.reported_at = time.monotonic()
        self.has_begun = asyncio.Event()
        """Whether it serves, or has ended."""
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
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_failed = False
        self._start_at: dict[int, float] = {}
        """When a process is started again, by place."""
        self._metrics = SummedMetrics()
        loop = asyncio.get_running_loop()
        self.watch = LoopWatch(lambda: loop, time.monotonic)
        self._collected: list[Metric] = []
        self._health = Health((), {"service": "gateway"})

    async def start(self) -> None:
        """Start all processes; raises what keeps one of them from its start."""
        count = self._settings.gateway.processes
        for place in range(count):
            await self._start(place)
        for process in list(self.processes.values()):
            await process.has_begun.wait()
            if process.health is None:
                limit = "processes that start; the log says why one did not"
                raise process.fault or SettingsError("gateway.processes", limit, count)
        self._refresh()
        self._run(self._tick())

    async def stop(self) -> None:
        """Refuse new connections at once, let all processes drain and leave, and kill those that do not."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # for all processes that share it
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        left = list(self.processes.values())
        for each in left:
            each.signal(signal.SIGTERM)
        settings = self._settings
        milliseconds = settings.gateway.drain_timeout_ms + settings.client.drain_timeout_ms + settings.bus.linger_ms
        waiting = asyncio.gather(*(each.process.wait() for each in left))
        try:
            async with asyncio.timeout(milliseconds / 1000 + LAST_SECONDS + _GRACE_SECONDS):
                await asyncio.shield(waiting)
        except TimeoutError:
            alive = [each for each in left if each.process.returncode is None]
            _log.error("processes did not leave and are killed", count=len(alive))
            for each in alive:
                each.signal(signal.SIGKILL)
            await waiting
        for each in left:
            await each.channel.close()
        self._tallies.close()

    # Processes.

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._has_failed = True
            _log.error("the supervisor failed: restart the gateway", exc_info=error)

    async def _start(self, place: int) -> None:
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
        self.processes[place] = started = _Process(process, channel)
        self._run(self._listen(place, started))

    async def _listen(self, place: int, process: _Process) -> None:
        """Take a process's reports until it ends; then count it no more, and say when another takes its place."""
        async for message in process.channel.messages():
            if "fault" in message:
                process.fault = _fault_of(*message["fault"])
                continue
            process.missed, process.reported_at = 0, time.monotonic()
            process.health = Health(tuple(message["problems"]), message["facts"])
            process.has_begun.set()
            self._metrics.take(place, message["metrics"])
            if message["asks"]:
                health, page = self._joined_health(), generate_latest(self._metrics).decode()
                process.channel.send(metrics=page, problems=health.problems, facts=health.facts)
        status = await process.process.wait()
        await process.channel.close()
        del self.processes[place]
        self._tallies.forget(place)
        self._metrics.lost(place)
        self._start_at[place] = time.monotonic() + _RESTART_SECONDS
        reason = None if process.fault is None else str(process.fault)
        _log.error("a process of the gateway ended", process=place, status=status, reason=reason)
        process.has_begun.set()

    async def _tick(self) -> None:
        """Start processes again that ended, kill those that stand still, and keep what the metrics' address shows."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            for place in [place for place, at in self._start_at.items() if at <= time.monotonic()]:
                try:
                    await self._start(place)
                    del self._start_at[place]
                except OSError as error:  # too many open files or processes, or no memory
                    self._start_at[place] = time.monotonic() + _RESTART_SECONDS
                    _log.error("a process of the gateway cannot be started", process=place, reason=str(error))
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
        silent = {place: now - each.reported_at for place, each in self.processes.items() if each.health is not None}
        healths = {place: each.health for place, each in self.processes.items() if each.health is not None}
        # A process reports once a second.
        health = joined_health(healths, silent, self._settings.metrics.stall_timeout_ms + round(1000 * _TICK_SECONDS))
        if self._has_failed:
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
    """Return what keeps a process from its start: an address with a reason, or a setting."""
    return SettingsError(name, reason, Shown(more[0]), more[1]) if more else AddressError(name, reason)


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
