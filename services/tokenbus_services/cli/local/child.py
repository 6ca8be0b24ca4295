"""One service in a process of its own, and the news of what happens to it."""

import asyncio
import contextlib
import json
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenbus_services.cli.local.plan import Service
from tokenbus_services.printable import printable

_OF_EVERY_LINE = ("timestamp", "level", "event", "logger", "exception")


@dataclass(frozen=True, slots=True)
class News:
    """What happened to which service, in words and as values."""

    service: str
    event: str
    """started, ready, log or ended."""
    text: str
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_bad(self) -> bool:
        """Whether it is an error."""
        return self.event == "ended" or self.values.get("level") in ("error", "critical")


def logged(service: str, line: Mapping[str, Any]) -> News:
    """Return the news of a line that a service logged."""
    facts = ", ".join(f"{name} {_short(value)}" for name, value in line.items() if name not in _OF_EVERY_LINE)
    text = f"{line.get('event', '')}" + (f": {facts}" if facts else "")
    if exception := str(line.get("exception", "")):
        text += f": {exception.strip().splitlines()[-1]}"
    return News(service, "log", text, line)


def _short(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


_MODULE = "tokenbus_services.cli.local"
_CHUNK = 65_536
_LONGEST_LINE = 1_048_576
_LAST_LINES = 20
_SHOWN_LEVELS = ("warning", "error", "critical")


class Child:
    """A service's process: started once, stopped by SIGTERM, and killed if that does not help."""

    def __init__(self, service: Service, tell: Callable[[News], None]) -> None:
        """Take the service, and the callback for its news."""
        self.service = service
        self.metrics = ""
        """Where it serves its metrics, once it has said so."""
        self.is_stopping = False
        self.is_ready = False
        self.status: int | None = None
        """Its exit status; negative: the signal that ended it; None: it runs."""
        self._tell = tell
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._changed = asyncio.Event()
        self._process: Process | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Its process id, or 0 before it started."""
        return 0 if self._process is None else self._process.pid

    @property
    def state(self) -> str:
        """What it does, in a word."""
        if self.status is not None:
            return "ended"
        return "stopping" if self.is_stopping else "ready" if self.is_ready else "starting"

    @property
    def has_failed(self) -> bool:
        """Whether it ended otherwise than it should; before it listens for SIGTERM, that is how it should end."""
        return bool(self.status) and not (self.is_stopping and self.status == -signal.SIGTERM)

    @property
    def how_it_ended(self) -> str:
        """Its exit status, or the name of the signal that ended it."""
        if self.status is None or self.status >= 0:
            return f"status {self.status}"
        try:
            return signal.Signals(-self.status).name
        except ValueError:
            return f"signal {-self.status}"

    @property
    def last_words(self) -> str:
        """The last line that it wrote before it ended which says what is wrong, if there is one."""
        return next((line for line in reversed(self._last) if line), "")

    async def start(self, lock: int) -> None:
        """Start it; it inherits a lock, which is held until it has ended."""
        self._process = await asyncio.create_subprocess_exec(
            # -P: nothing of the folder that it is started in takes the place of a module.
            *(sys.executable, "-P", "-m", _MODULE, f"{self.service.stop_seconds:g}", *self.service.arguments),
            stdin=PIPE,  # never written: its end tells the child that this process has ended
            stdout=PIPE,
            stderr=STDOUT,
            env=dict(self.service.environment),
            pass_fds=(lock,),
            start_new_session=True,  # a terminal's Ctrl-C reaches this process alone, which stops the child in its turn
        )
        self._tell(News(self.service.name, "started", f"started, process {self.pid}", {"pid": self.pid}))
        self._watching = asyncio.create_task(self._watch(self._process))

    async def ready(self, seconds: float) -> bool:
        """Wait until it is ready, has ended, or takes too long; return whether it is ready."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.is_ready and self.status is None:
                    self._changed.clear()
                    await self._changed.wait()
        return self.is_ready and self.status is None

    async def ended(self) -> None:
        """Wait for its end."""
        if self._watching is not None:
            await asyncio.shield(self._watching)

    async def stop(self, hurry: asyncio.Event) -> None:
        """Tell it to stop, and kill it if it does not within its time, or if there is haste."""
        if self._watching is None or self.status is not None:
            return
        self.is_stopping = True
        self._signal(signal.SIGTERM)
        hurrying = asyncio.create_task(hurry.wait())
        waits = [self._watching, hurrying]
        await asyncio.wait(waits, timeout=self.service.stop_seconds, return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        self._signal(signal.SIGKILL)
        await self.ended()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _watch(self, process: Process) -> None:
        """Read what it writes until it has ended."""
        if process.stdout is not None:
            await self._read(process.stdout)
        self.status = await process.wait()
        self._changed.set()
        if not self.is_stopping or self.has_failed:
            self._tell(News(self.service.name, "ended", self._end(), {"status": self.status}))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while data := await stream.read(_CHUNK):
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[:_LONGEST_LINE]  # a line without an end cannot grow without bound
            for line in lines:
                self._take(line.decode(errors="replace"))
        self._take(rest.decode(errors="replace"))

    def _take(self, text: str) -> None:
        try:
            line = json.loads(text)
        except ValueError:
            line = text
        if not isinstance(line, dict):
            self._last.append(printable(text.strip()))
            return
        self._note(line)
        if line.get("level") in _SHOWN_LEVELS:
            news = logged(self.service.name, line)
            self._last.append(printable(news.text))
            self._tell(news)

    def _note(self, line: dict[str, Any]) -> None:
        match line.get("event"):
            case "serving metrics":
                self.metrics = str(line.get("address", ""))
            case event if event == self.service.ready_event and not self.is_ready:
                self.is_ready = True
                self._tell(News(self.service.name, "ready", "ready", {"pid": self.pid}))
        self._changed.set()

    def _end(self) -> str:
        return f"ended with {self.how_it_ended}" + (f": {self.last_words}" if self.last_words else "")
