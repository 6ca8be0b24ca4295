"""Supervisor: starts services as child processes in order, reports what happens to them, and stops them in order."""

import asyncio
import json
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.printable import printable, reason_of

START_SECONDS = 300
_REPORT_SECONDS = 1.0
_LAST_LINES = 100
"""Maximum number of stored output lines. Engines write many lines after the line that explains a failure."""
_LONGEST_LINE = 1_048_576
"""Number of characters above which a line is split."""
_MOST_CHARACTERS = 2000
_ERROR = "tokenbus: "
"""The prefix of the error line of a failed command."""
_KILLED = {-signal.SIGKILL, -signal.SIGTERM}
_SHOWN_LEVELS = ("warning", "error", "critical")
_COMMON_FIELDS = ("timestamp", "level", "event", "logger", "exception")
_STARTS = ("processor", "gateway", "worker")
"""Services in the order of starting. The gateway starts before the slow workers, to report a bad tokenizer early."""
_STOPS = ("gateway", "worker", "processor")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP means that the terminal is gone
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Service:
    """The command of a child process, and the time limit for stopping the process."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    ready_event: str
    """The log event with which the service reports that it is ready."""
    stop_seconds: float
    """Number of seconds between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True)
class ServiceEvent:
    """An event of a service, as text and as values."""

    service: str
    event: str
    """The kind of event: started, starting, ready, log, output or ended."""
    text: str
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_error(self) -> bool:
        """Whether the service ended or logged an error."""
        return self.event == "ended" or self.values.get("level") in ("error", "critical")


class Child:
    """The process of a service. A process that ignores SIGTERM is stopped with SIGKILL after a time limit."""

    def __init__(self, service: Service, report: Callable[[ServiceEvent], None]) -> None:
        self.service = service
        self.name = service.name
        self.pid = 0
        self.address = self.metrics = ""
        """The HTTP address and the metrics address that the service logged. Each is empty until it is logged."""
        self.is_stopping = False
        self.status: int | None = None
        """The exit status, negative if a signal ended the process, or None before the end."""
        self.ended: asyncio.Task[None] | None = None
        """A task that is done when the process has ended and its output is read, or None before the start."""
        self._report = report
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        """The last warnings of the service, and the last lines of other output."""
        self._wrote_at = 0.0
        self._ready = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def runs(self) -> bool:
        """Whether the process has started and has not ended."""
        return self.ended is not None and self.status is None

    @property
    def state(self) -> str:
        """The state: starting, ready or ended."""
        return "ended" if self.status is not None else "ready" if self._ready.is_set() else "starting"

    @property
    def has_failed(self) -> bool:
        """Whether the process ended with an error. A process that `stop` ends by SIGTERM has not failed."""
        return bool(self.status) and not (self.is_stopping and self.status == -signal.SIGTERM)

    @property
    def how_it_ended(self) -> str:
        """The exit status or the name of the signal, as text."""
        status = self.status or 0
        names = {-each: each.name for each in signal.Signals}
        return f"ended with status {status}" if status >= 0 else f"ended with {names.get(status, f'signal {-status}')}"

    @property
    def last_line(self) -> str:
        """A colon and the line that explains why the process ended: the command's error line, or else the last line.

        Libraries may write lines after the error line. The text is empty for a killed process or without output.
        """
        if self.status in _KILLED:
            return ""
        lines = ["", *self._last]
        line = next((line for line in reversed(lines) if line.startswith(_ERROR)), lines[-1])
        return line and f": {line.removeprefix(_ERROR)}"

    async def start(self, folder: Path) -> None:
        """Start the child process, which removes the folder if this process is killed."""
        command = [sys.executable, "-P", "-m", "tokenbus.cli.child"]  # -P: no imports from the current folder
        try:
            self._process = await asyncio.create_subprocess_exec(
                *[*command, f"{self.service.stop_seconds:g}", str(folder), *self.service.arguments],
                stdin=asyncio.subprocess.PIPE,  # the pipe closes when this process ends
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(self.service.environment),
                start_new_session=True,  # Ctrl-C reaches only this process, which stops the child
            )
        except OSError as error:
            raise CommandError(f"{self.name}: cannot start a process: {reason_of(error)}") from None
        self.pid = self._process.pid
        self._report(ServiceEvent(self.name, "started", f"started, process {self.pid}", {"pid": self.pid}))
        self.ended = asyncio.create_task(self._watch(self._process))

    async def ready(self, seconds: float) -> None:
        """Wait until the service is ready. Raises CommandError if the service ends or is silent for `seconds`."""
        time = asyncio.get_running_loop().time
        began = self._wrote_at = time()
        while True:
            await self._first(self._ready, min(seconds, _REPORT_SECONDS))
            if self.status is not None:
                problem = f"{self.how_it_ended} before it was ready"
                break
            if self._ready.is_set():
                return
            now = time()
            if now - self._wrote_at >= seconds:
                silent = f"and silent for {now - self._wrote_at:.0f} s"
                problem = f"not ready after {now - began:.0f} s, {silent} (up --start-seconds)"
                break
            text = f"starting for {now - began:.0f} s{self.last_line}"
            self._report(ServiceEvent(self.name, "starting", text, {"pid": self.pid}))
        if lines := list(self._last):
            self._report(ServiceEvent(self.name, "output", "\n".join(lines), {"lines": lines}))
        raise CommandError(f"{self.name}: {problem}{self.last_line}", WRONG_USE if self.status == WRONG_USE else 1)

    async def kill(self) -> None:
        """End the process with SIGKILL, without a report."""
        self._report = lambda _: None
        if self._process is not None and self.ended is not None:
            self._process.kill()
            await self.ended

    async def stop(self, kill_now: asyncio.Event) -> None:
        """Send SIGTERM, and send SIGKILL after the time limit or when `kill_now` is set."""
        if self._process is None or self.ended is None or self.ended.done():
            return
        self.is_stopping = True
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
            await self._first(kill_now, self.service.stop_seconds)
            self._process.kill()
        await self.ended

    async def _first(self, event: asyncio.Event, seconds: float) -> None:
        waiting = asyncio.ensure_future(event.wait())
        try:
            tasks: list[asyncio.Future[Any]] = [waiting, *([self.ended] if self.ended else [])]
            await asyncio.wait(tasks, timeout=seconds, return_when="FIRST_COMPLETED")
        finally:
            waiting.cancel()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        if process.stdout is not None:
            await self.read(process.stdout)
        self.status = await process.wait()
        if not self.is_stopping or self.has_failed:
            text = f"{self.how_it_ended}{self.last_line}"
            self._report(ServiceEvent(self.name, "ended", text, {"status": self.status}))

    async def read(self, output: asyncio.StreamReader) -> None:
        """Read the output of the process to its end."""
        rest = b""
        while data := await output.read(_LONGEST_LINE):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) >= _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._read_line(line.decode(errors="replace").strip())
        self._read_line(rest.decode(errors="replace").strip())

    def _read_line(self, text: str) -> None:
        self._wrote_at = asyncio.get_running_loop().time()
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            self._keep(text)
            return
        if line.get("event") == "serving metrics":
            self.metrics = str(line.get("address", ""))
        elif line.get("event") == self.service.ready_event and not self._ready.is_set():
            self.address = str(line.get("address", ""))
            self._ready.set()
            self._report(ServiceEvent(self.name, "ready", "ready", {"pid": self.pid}))
        if line.get("level") in _SHOWN_LEVELS:
            self._keep(_text_of(line))
            self._report(ServiceEvent(self.name, "log", _text_of(line), line))

    def _keep(self, text: str) -> None:
        if text:
            self._last.append(printable(text)[:_MOST_CHARACTERS])


def _text_of(line: Mapping[str, Any]) -> str:
    values = {name: value for name, value in line.items() if name not in _COMMON_FIELDS}
    words = [f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()]
    text = str(line.get("event", "")) + (f": {', '.join(words)}" if words else "")
    raised = str(line.get("exception", "")).strip().splitlines()[-1:]
    return ": ".join([text, *raised])


class Supervisor:
    """Runs services during some work. Dead services are reported but not restarted."""

    def __init__(
        self,
        services: Iterable[Service],
        folder: Path,
        report: Callable[[ServiceEvent], None],
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.children = [Child(service, report) for service in services]
        self.stopping = asyncio.Event()
        """An event that the first signal or a caller sets in order to cancel the work and stop all services."""
        self._kill_now = asyncio.Event()
        self._folder = folder
        self._report = report
        self._start_seconds = start_seconds

    @property
    def died(self) -> list[str]:
        """The names of the services that failed."""
        return [child.name for child in self.children if child.has_failed]

    def runs(self, *prefixes: str) -> bool:
        """Return whether a service with any of the prefixes in its name is running."""
        return any(child.runs and child.name.startswith(prefixes) for child in self.children)

    async def next_exit(self) -> Child:
        """Wait until a running service ends, and return the service. A service that `restart` kills is ignored."""
        while True:
            running = {child.ended: child for child in self.children if child.ended is not None and child.runs}
            done, _ = await asyncio.wait(running, return_when="FIRST_COMPLETED")
            if (child := running[done.pop()]) in self.children:
                return child

    async def restart(self, name: str) -> None:
        """Kill a service, start it again, and wait until the service is ready."""
        (killed,) = (child for child in self.children if child.name == name)
        child = Child(killed.service, self._report)
        self.children[self.children.index(killed)] = child
        await killed.kill()
        await child.start(self._folder)
        await child.ready(self._start_seconds)

    async def run(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """Start all services, do the work, stop all services, and return the result of the work.

        Returns None if a signal or `stopping` cancelled the work. A second signal kills the remaining services. Raises
        CommandError if a service does not start.
        """
        with self._signal_handlers():
            working, stopping = asyncio.ensure_future(self._run(work)), asyncio.ensure_future(self.stopping.wait())
            await asyncio.wait([working, stopping], return_when="FIRST_COMPLETED")
            stopping.cancel()
            if not self.stopping.is_set():
                return await working
            if not any(child.is_stopping for child in self.children):
                working.cancel()
            with suppress(asyncio.CancelledError):
                await working
            return None

    async def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        try:
            for children in map(self._children_of, _STARTS):
                for child in children:
                    await child.start(self._folder)
                await asyncio.gather(*(child.ready(self._start_seconds) for child in children))
            return await work()
        finally:
            for children in map(self._children_of, _STOPS):
                await asyncio.gather(*(child.stop(self._kill_now) for child in children))

    def _children_of(self, command: str) -> list[Child]:
        return [child for child in self.children if child.service.arguments[0] == command]

    @contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        def on_signal() -> None:
            (self._kill_now if self.stopping.is_set() else self.stopping).set()

        loop = asyncio.get_running_loop()
        # nohup ignores SIGHUP on purpose. Shells ignore SIGINT in background processes, but this process handles it.
        handled = [each for each in _SIGNALS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]
        for each in handled:
            loop.add_signal_handler(each, on_signal)
        try:
            yield
        finally:
            for each in handled:
                loop.remove_signal_handler(each)
