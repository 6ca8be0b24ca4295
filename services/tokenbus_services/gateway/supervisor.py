"""Supervisor: serves one address with several processes, to which it passes connections, and is one gateway outside."""

import asyncio
import contextlib
import fcntl
import socket
import sys
import termios
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tokenbus_services.bus import AddressError
from tokenbus_services.gateway.acceptor import Acceptor
from tokenbus_services.gateway.channel import Channel, FailedAnswerError
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
_ASK_SECONDS = 1.0
_SCRAPE_SECONDS = 1.0
"""How old the counts of a process that dies may be."""
_FIRST_DELAY, _MOST_DELAY = 0.5, 30.0
_BEAT_SECONDS = 0.5
"""How often each process is asked for a sign of life, and how long it may take before it gets no new connections."""
_MOST_MISSED = 40
"""After so many beats without an answer a process is killed: it stands still, however busy the machine is."""
_STEADY_SECONDS = 60.0
"""A process that served for so long is started again with the first delay."""
_GRACE_SECONDS = 5.0


class _Process:
    """One process that serves: how to reach it, and how many connections it has."""

    def __init__(self, place: int, process: asyncio.subprocess.Process, connections: socket.socket) -> None:
        self.place = place
        self.process = process
        self.began = self.answered_at = time.monotonic()
        self.channel: Channel | None = None
        self.is_ready = asyncio.Event()
        self.fault: SettingsError | AddressError | None = None
        self.missed = 0
        """For how many beats the sign of life that it was asked for has not come."""
        self._connections = connections
        self._passed = 0
        self._closed = 0

    @property
    def load(self) -> int:
        """How many of the connections that were passed to it are open, as it last reported."""
        return self._passed - self._closed

    @property
    def untaken(self) -> int:
        """How much of what was passed to it waits to be taken, in bytes of the kernel's."""
        return int.from_bytes(fcntl.ioctl(self._connections, termios.TIOCOUTQ, bytes(4)), sys.byteorder)

    async def is_alive(self) -> bool:
        """Ask for a sign of life; False: none has come for so many beats that the process stands still.

        Beats are counted, not seconds: those in which this process stood still are none.
        """
        answer = asyncio.ensure_future(self.ask("alive", 2 * _MOST_MISSED * _BEAT_SECONDS))
        try:
            while not (await asyncio.wait([answer], timeout=_BEAT_SECONDS))[0] and self.missed < _MOST_MISSED:
                self.missed += 1
            if is_alive := answer.done():
                self.missed = 0
            return is_alive
        finally:
            answer.cancel()

    def pass_on(self, connection: socket.socket) -> bool:
        """Pass a connection; return False if the process is gone, or has not taken those before."""
        try:
            socket.send_fds(self._connections, [b"\0"], [connection.fileno()])
        except OSError:
            return False
        self._passed += 1
        return True

    def on_message(self, what: str, value: Any) -> None:  # noqa: ANN401 - JSON
        """Take what it tells."""
        if what == "closed":
            self._closed = value
        elif what == "ready":
            self.is_ready.set()
        elif what == "failed":
            self.fault = _fault_of(*value)

    async def ask(self, what: str, seconds: float) -> Any:  # noqa: ANN401 - JSON
        """Return its answer; None: it has not answered in time."""
        if self.channel is None:
            return None
        try:
            answer = await self.channel.ask(what, seconds)
        except (TimeoutError, FailedAnswerError):
            return None
        self.answered_at = time.monotonic()
        return answer

    def close(self) -> None:
        """Close what leads to it."""
        self._connections.close()
        if self.channel is not None:
            self.channel.close()


class Supervisor(Collector):
    """Starts the processes, starts those that die again, passes connections on, and answers for all of them."""

    def __init__(self, settings: Settings, listening: socket.socket, address: str) -> None:
        """Take the settings, the socket that clients connect to, and its address."""
        self.address = address
        self._settings = settings
        self._acceptor = Acceptor(listening, self._pass_on)
        self._tallies = SharedTallies()
        self._processes: dict[int, _Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._reading: set[asyncio.Task[None]] = set()
        self._metrics = SummedMetrics()
        self._loop = loop = asyncio.get_running_loop()
        self.watch = LoopWatch(lambda: loop, time.monotonic)
        self._last_collected: list[Metric] = []

    async def start(self) -> None:
        """Start all processes, and begin to accept connections; raises what keeps one of them from its start."""
        places = range(self._settings.gateway.processes)
        started = [await self._start(place) for place in places]
        await asyncio.gather(*map(self._until_ready, started))
        for process in started:
            if process.fault is not None:
                raise process.fault
            if not process.is_ready.is_set():
                limit = "processes that start; the log says why one did not"
                raise SettingsError("gateway.processes", limit, len(started))
        self._keepers = [asyncio.create_task(self._keep(process)) for process in started]
        self._keepers.append(asyncio.create_task(self._scrape()))
        for keeper in self._keepers:
            keeper.add_done_callback(_log_failure)
        self._acceptor.start()

    async def stop(self) -> None:
        """Accept no more, let all processes drain and leave; kill those that do not."""
        self._acceptor.stop()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        left = list(self._processes.values())
        for each in left:
            if each.channel is not None:
                each.channel.tell("drain")
        settings = self._settings
        milliseconds = settings.gateway.drain_timeout_ms + settings.client.drain_timeout_ms + settings.bus.linger_ms
        if left:
            waiting = [asyncio.ensure_future(each.process.wait()) for each in left]
            _, late = await asyncio.wait(waiting, timeout=milliseconds / 1000 + LAST_SECONDS + _GRACE_SECONDS)
            if late:
                _log.error("processes did not leave and are killed", count=len(late))
                for each in left:
                    if each.process.returncode is None:
                        each.process.kill()
                await asyncio.wait(waiting)
        for each in left:
            each.close()
        self._tallies.close()

    # Processes.

    async def _start(self, place: int) -> _Process:
        channel, its_channel = socket.socketpair()
        connections, its_connections = socket.socketpair()
        connections.setblocking(False)  # noqa: FBT003 - a name of the standard library's
        inherited = its_channel.fileno(), its_connections.fileno(), self._tallies.descriptor
        try:
            process = _Process(
                place,
                await asyncio.create_subprocess_exec(
                    # -P: nothing of the folder that it is started in takes the place of a module.
                    *(sys.executable, "-P", "-m", _MODULE, *map(str, inherited)),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=inherited,
                ),
                connections,
            )
        except BaseException:
            channel.close()
            connections.close()
            raise
        finally:
            its_channel.close()
            its_connections.close()
        self._processes[place] = process
        process.channel = await Channel.over(channel, process.on_message, self._answer)
        reading = asyncio.create_task(process.channel.run())
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        given = {"place": place, "address": self.address, "settings": self._settings.describe()}
        process.channel.tell("begin", given)
        return process

    @staticmethod
    async def _until_ready(process: _Process) -> None:
        """Wait until a process serves, or has ended."""
        waiting = [asyncio.ensure_future(process.is_ready.wait()), asyncio.ensure_future(process.process.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()

    async def _keep(self, process: _Process) -> None:
        """Start a process again whenever it ends."""
        place, delay = process.place, _FIRST_DELAY
        while True:
            status = await self._until_ended(process)
            if time.monotonic() - process.began > _STEADY_SECONDS:
                delay = _FIRST_DELAY
            process.close()
            del self._processes[place]
            self._tallies.forget(place)
            self._metrics.lost(place)
            reason = None if process.fault is None else str(process.fault)
            _log.error("a process of the gateway ended", process=place, status=status, reason=reason, again_in=delay)
            started: _Process | None = None
            while started is None:
                await asyncio.sleep(delay)
                delay = min(_MOST_DELAY, 2 * delay)
                try:
                    started = await self._start(place)
                except OSError as error:  # too many open files or processes, or no memory
                    reason = str(error)
                    _log.error(
                        "a process of the gateway cannot be started", process=place, reason=reason, again_in=delay
                    )
            process = started

    async def _until_ended(self, process: _Process) -> int:
        """Return a process's exit status once it has ended, or was killed because it answers nothing."""
        await self._until_ready(process)  # one that starts may load large files for long
        self._acceptor.go_on()
        watching = asyncio.create_task(self._kill_if_silent(process))
        try:
            return await process.process.wait()
        finally:
            watching.cancel()

    @staticmethod
    async def _kill_if_silent(process: _Process) -> None:
        """Kill a process that gives no sign of life."""
        while await process.is_alive():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(_BEAT_SECONDS)
        _log.error("a process of the gateway answers nothing and is killed", process=process.place)
        with contextlib.suppress(ProcessLookupError):
            process.process.kill()

    # Connections.

    def _pass_on(self, connection: socket.socket) -> bool:
        """Pass a connection to the process that has the fewest, of those that answer; return False if none takes it.

        One that has just begun to stand still has not taken the last one: of two, the other one gets the next.
        """
        ready = [each for each in self._processes.values() if each.is_ready.is_set() and not each.missed]
        if not any(each.pass_on(connection) for each in sorted(ready, key=lambda each: (each.untaken, each.load))):
            return False
        connection.close()
        return True

    # Answers.

    async def _scrape(self) -> None:
        """Know every second what each process has counted, in case it dies."""
        while True:
            await asyncio.sleep(_SCRAPE_SECONDS)
            await self._ask_all("metrics")
            self._acceptor.tick()

    async def _ask_all(self, what: str, seconds: float = _ASK_SECONDS) -> dict[int, Any]:
        """Return the answers of all processes that serve and have not ended meanwhile; None: it has not answered."""
        asked = {place: each for place, each in self._processes.items() if each.is_ready.is_set()}
        found = await asyncio.gather(*(each.ask(what, seconds) for each in asked.values()))
        answers = {
            place: answer
            for (place, each), answer in zip(asked.items(), found, strict=True)
            if self._processes.get(place) is each
        }
        if what == "metrics":
            for place, page in answers.items():
                if page is not None:
                    self._metrics.take(place, page)
        return answers

    async def _answer(self, what: str) -> Any:  # noqa: ANN401 - JSON
        """Answer a process that a client has asked about all of them."""
        if what == "metrics":
            await self._ask_all(what)
            return generate_latest(self._metrics).decode()
        if what == "health":
            health = await self._health()
            return {"problems": health.problems, "facts": health.facts}
        # Each asks the processor, which may take that long.
        answers = await self._ask_all(what, self._settings.gateway.bus_timeout_ms / 1000 + _ASK_SECONDS)
        problems = [
            problem
            for place, each in answers.items()
            for problem in ([f"process {place} has not answered"] if each is None else each)
        ]
        return list(dict.fromkeys(problems))

    async def _health(self) -> Health:
        answers = await self._ask_all("health")
        now = time.monotonic()
        silent = {place: now - self._processes[place].answered_at for place in answers}
        health = joined_health(answers, silent, self._settings.metrics.stall_timeout_ms)
        if any(keeper.done() for keeper in self._keepers):
            health = replace(health, problems=(*health.problems, "its supervisor has failed: restart the gateway"))
        return health

    # For the metrics' own address, on its thread.

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all processes."""
        asking = asyncio.run_coroutine_threadsafe(self._collected(), self._loop)
        try:
            self._last_collected = asking.result(2 * _ASK_SECONDS)
        except TimeoutError:  # the event loop is stuck: those of before
            asking.cancel()
        return iter(self._last_collected)

    async def _collected(self) -> list[Metric]:
        await self._ask_all("metrics")
        return list(self._metrics.collect())

    def health(self) -> Health:
        """Return the health of all processes; if the event loop is stuck for long, that is the problem."""
        asking = asyncio.run_coroutine_threadsafe(self._health(), self._loop)
        try:
            return asking.result(2 * _ASK_SECONDS)
        except TimeoutError:
            asking.cancel()
            problems = stalled(self.watch, self._settings.metrics.stall_timeout_ms)
            return Health(tuple(problems), {"service": "gateway"})


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
    if not hasattr(socket, "send_fds"):
        limit = "1 on this system, which cannot pass sockets between processes"
        raise SettingsError("gateway.processes", limit, settings.gateway.processes)
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
