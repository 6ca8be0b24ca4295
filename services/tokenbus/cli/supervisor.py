"""Supervisor: services as child processes, which it starts in order, watches, reports on, and stops in order."""

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.cli.starting import Output, SignsOfLife
from tokenbus.printable import printable, reason_of

START_SECONDS = 60
_MOST_STARTS = 60
"""So many times that long a service may start altogether, whatever it does."""
_LOOK_SECONDS = 1.0
_LAST_LINES = 20
_LONGEST_LINE = 1_048_576
"""A longer one is taken in pieces."""
_ERROR = "tokenbus: "
_KILLED = {-signal.SIGKILL, -signal.SIGTERM}
"""Begins the line of an error that ends a command."""
_SHOWN_LEVELS = ("warning", "error", "critical")
_OF_EVERY_LINE = ("timestamp", "level", "event", "logger", "exception")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last is sent when the terminal goes away
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Service:
    """One child process: what it runs, when it starts and stops, and how long each may take."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    ready_event: str
    """The event that it logs once it is of use."""
    stop_seconds: float
    """How long it may take to leave after SIGTERM."""
    starts: int = 0
    """Services of a higher number start once those of this one are ready."""
    stops: int = 0
    """Services of a higher number stop once those of this one have ended."""


@dataclass(frozen=True, slots=True)
class News:
    """What happened to which service, in words and as values."""

    service: str
    event: str
    """started, starting, ready, log, output or ended."""
    text: str
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_bad(self) -> bool:
        """Whether it is an error."""
        return self.event == "ended" or self.values.get("level") in ("error", "critical")


class Child:
    """A service's process: started once, stopped by SIGTERM, and killed if that does not help."""

    def __init__(self, service: Service, report: Callable[[News], None]) -> None:
        self.service = service
        self.name = service.name
        self.pid = 0
        self.address = self.metrics = ""
        """Where a gateway listens, and where metrics are served, once they are logged."""
        self.is_stopping = False
        self.status: int | None = None
        """Its exit status; negative: the signal that ended it; None: it has not ended."""
        self.ended: asyncio.Task[None] | None = None
        """Done once it has ended and its output is read; None before it started."""
        self._report = report
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._output = Output()
        self._lines = 0
        self._ready = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self.ended is not None and self.status is None

    @property
    def state(self) -> str:
        """What it does, in a word."""
        return "ended" if self.status is not None else "ready" if self._ready.is_set() else "starting"

    @property
    def has_failed(self) -> bool:
        """Whether it ended otherwise than it should; before it listens for SIGTERM, that is how it should end."""
        return bool(self.status) and not (self.is_stopping and self.status == -signal.SIGTERM)

    @property
    def how_it_ended(self) -> str:
        """Its exit status, or the name of the signal that ended it."""
        status = self.status or 0
        names = {-each: each.name for each in signal.Signals}
        return f"ended with status {status}" if status >= 0 else f"ended with {names.get(status, f'signal {-status}')}"

    @property
    def last_line(self) -> str:
        """The error of the process, or its last output line, after a colon; empty where there is none.

        Libraries may write after the error. The last line of a process that somebody killed does not say why it ended.
        """
        if self.status in _KILLED:
            return ""
        lines = [line for line in reversed(self._last) if line]
        line = next((line for line in lines if line.startswith(_ERROR)), "".join(lines[:1]))
        return line and f": {line.removeprefix(_ERROR)}"

    async def start(self, folder: Path) -> None:
        """Start it; it removes the folder should this process be killed."""
        # -P: nothing of the folder that it is started in takes the place of a module.
        command = [sys.executable, "-P", "-m", "tokenbus.cli.child"]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *[*command, f"{self.service.stop_seconds:g}", str(folder), *self.service.arguments],
                stdin=asyncio.subprocess.PIPE,  # never written: its end tells the child that this process has ended
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(self.service.environment),
                start_new_session=True,  # a terminal's Ctrl-C reaches this process alone, which stops its children
            )
        except OSError as error:
            why = reason_of(error)
            raise CommandError(f"{self.name}: no process can be started: {why}") from None
        self.pid = self._process.pid
        self._report(News(self.name, "started", f"started, process {self.pid}", {"pid": self.pid}))
        self.ended = asyncio.create_task(self._watch(self._process))

    async def ready(self, seconds: float) -> None:
        """Wait until it is ready; raise a CommandError where it ends before, or does nothing for so long."""
        time = asyncio.get_running_loop().time
        began = busy = time()
        signs = SignsOfLife(self.pid, began)
        while True:
            await self._first(self._ready, min(seconds, _LOOK_SECONDS))
            if self.status is not None:
                problem = f"{self.how_it_ended} before it was ready"
                break
            if self._ready.is_set():
                return
            now = time()
            if signs.seen(self._lines, now):
                busy = now
            if now - busy >= seconds or now - began >= _MOST_STARTS * seconds:
                idle = f"of which it did nothing for {now - busy:.0f}"
                problem = f"not ready after {now - began:.0f} s, {idle} (up --start-seconds)"
                break
            text = f"starting for {now - began:.0f} s{self.last_line}"
            self._report(News(self.name, "starting", text, {"pid": self.pid}))
        if lines := self._output.take():
            self._report(News(self.name, "output", "\n".join(lines), {"lines": lines}))
        raise CommandError(f"{self.name}: {problem}{self.last_line}", WRONG_USE if self.status == WRONG_USE else 1)

    async def kill(self) -> None:
        """End it by SIGKILL, which is no event to report."""
        self._report = lambda _: None
        if self._process is not None and self.ended is not None:
            self._process.kill()
            await self.ended

    async def stop(self, hurry: asyncio.Event) -> None:
        """Send it SIGTERM, and kill it once its time is over or `hurry` is set."""
        if self._process is None or self.ended is None or self.ended.done():
            return
        self.is_stopping = True
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
            await self._first(hurry, self.service.stop_seconds)
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
            self._report(News(self.name, "ended", f"{self.how_it_ended}{self.last_line}", {"status": self.status}))

    async def read(self, output: asyncio.StreamReader) -> None:
        """Take each line that it writes, until it writes no more."""
        rest = b""
        while data := await output.read(_LONGEST_LINE):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) >= _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._take(line.decode(errors="replace").strip())
        self._take(rest.decode(errors="replace").strip())

    def _take(self, text: str) -> None:
        self._lines += 1
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            self._last.append(printable(text))
            self._output.add(printable(text))
            return
        if line.get("event") == "serving metrics":
            self.metrics = str(line.get("address", ""))
        elif line.get("event") == self.service.ready_event and not self._ready.is_set():
            self.address = str(line.get("address", ""))
            self._ready.set()
            self._output.take()
            self._report(News(self.name, "ready", "ready", {"pid": self.pid}))
        if line.get("level") in _SHOWN_LEVELS:
            self._last.append(printable(_text_of(line)))
            self._report(News(self.name, "log", _text_of(line), line))


def _text_of(line: Mapping[str, Any]) -> str:
    values = {name: value for name, value in line.items() if name not in _OF_EVERY_LINE}
    words = [f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()]
    text = str(line.get("event", "")) + (f": {', '.join(words)}" if words else "")
    raised = str(line.get("exception", "")).strip().splitlines()[-1:]
    return ": ".join([text, *raised])


class Supervisor:
    """Runs services while some work is done with them; one that dies is reported, and not started again."""

    def __init__(
        self,
        services: Iterable[Service],
        folder: Path,
        report: Callable[[News], None],
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.children = [Child(service, report) for service in services]
        self.leave = asyncio.Event()
        """Set it to end the work and stop everything, as the first signal does."""
        self._hurry = asyncio.Event()
        self._folder = folder
        self._report = report
        self._start_seconds = start_seconds

    @property
    def died(self) -> list[str]:
        """The services that ended otherwise than they should."""
        return [child.name for child in self.children if child.has_failed]

    def runs(self, *prefixes: str) -> bool:
        """Return whether a service runs whose name begins with one of these."""
        return any(child.runs and child.name.startswith(prefixes) for child in self.children)

    async def one_ended(self) -> Child:
        """Wait until a service ends that runs now and is not restarted, and return it."""
        while True:
            running = {child.ended: child for child in self.children if child.ended is not None and child.runs}
            done, _ = await asyncio.wait(running, return_when="FIRST_COMPLETED")
            if (child := running[done.pop()]) in self.children:
                return child

    async def restart(self, name: str) -> None:
        """Kill a service, start it again, and wait until it is ready."""
        (killed,) = (child for child in self.children if child.name == name)
        child = Child(killed.service, self._report)
        self.children[self.children.index(killed)] = child
        await killed.kill()
        await child.start(self._folder)
        await child.ready(self._start_seconds)

    async def run(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """Start everything, do the work, and stop everything.

        Return what the work comes to, or None where a signal, or `leave`, ended it before. A second signal kills what
        still runs; Ctrl-Z suspends all of it. Raises a CommandError if a service does not start.
        """
        with self._on_signals(), self._suspended_together():
            working, leaving = asyncio.ensure_future(self._run(work)), asyncio.ensure_future(self.leave.wait())
            await asyncio.wait([working, leaving], return_when="FIRST_COMPLETED")
            leaving.cancel()
            if not self.leave.is_set():
                return await working
            if not any(child.is_stopping for child in self.children):
                working.cancel()
            with suppress(asyncio.CancelledError):
                await working
            return None

    async def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        try:
            for children in self._grouped("starts"):
                for child in children:
                    await child.start(self._folder)
                await asyncio.gather(*(child.ready(self._start_seconds) for child in children))
            return await work()
        finally:
            for children in self._grouped("stops"):
                await asyncio.gather(*(child.stop(self._hurry) for child in children))

    def _grouped(self, number: str) -> list[Sequence[Child]]:
        of_service = attrgetter(f"service.{number}")
        return [list(children) for _, children in groupby(sorted(self.children, key=of_service), of_service)]

    @contextmanager
    def _on_signals(self) -> Iterator[None]:
        """Let the first signal set `leave`, and the second kill what still runs."""
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            (self._hurry if self.leave.is_set() else self.leave).set()

        # A hangup that is ignored already stays so, as under nohup. Not so SIGINT: a shell ignores it for all that a
        # script starts in the background, and means nothing by that.
        heard = [each for each in _SIGNALS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]
        for each in heard:
            loop.add_signal_handler(each, on_signal)
        try:
            yield
        finally:
            for each in heard:
                loop.remove_signal_handler(each)

    @contextmanager
    def _suspended_together(self) -> Iterator[None]:
        """Let SIGTSTP stop the services and then this process; when that goes on, they do."""

        def suspend(_number: int, _frame: FrameType | None) -> None:
            stopped = [child.pid for child in self.children if child.runs]
            _send(stopped, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)  # it returns when a shell's `fg` or `bg` lets this process go on
            _send(stopped, signal.SIGCONT)

        if signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:  # a shell without jobs ignores it
            yield
            return
        signal.signal(signal.SIGTSTP, suspend)
        try:
            yield
        finally:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def _send(groups: Iterable[int], number: signal.Signals) -> None:
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, number)
