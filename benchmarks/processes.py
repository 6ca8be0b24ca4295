"""Processes of a benchmark: its own, which do one task after the other, the system's, and what all of them use."""

import asyncio
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.system.deployment import Deployment
from tokenbus.client import Client
from tokenbus.logs import configure
from tokenbus.settings import LogSettings

PROMPT = "In the evening the old man said"
PATIENCE = 600.0
"""Seconds that a benchmark waits for its processes: on a busy machine each may stand still for long."""
_LOOK_SECONDS = 0.1
_PROC = Path("/proc")
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_USER, _SYSTEM = 11, 12
"""Fields of a process's `stat`, counted from behind its name."""


class TaskFailedError(Exception):
    """A process could not do its task; the message has that process's traceback."""


class Child:
    """A process that runs functions for this one, one after the other; it ends with this process.

    A function gets the connection to this process, and then the arguments of `begin`. The value that it returns is sent
    as its last answer.
    """

    def __init__(self, core: int | None = None) -> None:
        self.connection, theirs = Pipe()
        # Not forked: this process may have threads and sockets.
        self._process = get_context("spawn").Process(target=_serve, args=(theirs, core), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.close()
        self._process.kill()
        self._process.join()

    def begin(self, task: Callable[..., object], *arguments: object) -> None:
        if task.__module__.endswith(".__main__"):  # `python -m` of its package calls that module another name
            raise ValueError(f"{task.__name__}: a process that is started cannot import a package's __main__")
        self.connection.send((task, arguments))

    def send(self, value: object) -> None:
        self.connection.send(value)

    def answer(self, seconds: float = 3600.0) -> Any:  # noqa: ANN401 - each task has its own
        if not self.connection.poll(seconds):
            raise TaskFailedError(f"no answer within {seconds:g} s")
        try:
            answer = self.connection.recv()
        except EOFError:
            self._process.join()
            raise TaskFailedError(f"the process ended with status {self._process.exitcode}") from None
        if isinstance(answer, TaskFailedError):
            raise answer
        return answer

    def ask(self, value: object) -> Any:  # noqa: ANN401 - each task has its own
        self.send(value)
        return self.answer()


def answers_of(*children: Child) -> list[Any]:
    answers: dict[Child, Any] = {}
    while waiting := {child.connection: child for child in children if child not in answers}:
        for connection in wait(list(waiting)):
            child = waiting[connection]  # type: ignore[index]
            answers[child] = child.answer()
    return [answers[child] for child in children]


def _end_with_the_parent() -> None:
    if parent := parent_process():
        parent.join()
        os._exit(1)


def _serve(connection: Connection, core: int | None) -> None:
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    if core is not None:
        os.sched_setaffinity(0, {core})
    configure(LogSettings(level="error"))
    while True:
        try:
            task, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = task(connection, *arguments)
        except Exception:  # noqa: BLE001 - whatever it is, it belongs to the process that gave the task
            answer = TaskFailedError(traceback.format_exc())
        connection.send(answer)


_OF_TESTS = ("heartbeat_ms", "heartbeat_timeout_ms", "reconnect_ms", "reconnect_max_ms")
"""The settings of the bus that the tests' deployment has values of its own for."""


@contextmanager
def deployed(**settings: object) -> Iterator[Deployment]:
    """Yield a deployment with the default settings, but for these, with a double underscore for a key's dot."""
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        deployment = Deployment(Path(folder))
        for name in _OF_TESTS:
            del deployment.overrides[f"bus.{name}"]
        deployment.overrides |= {name.replace("__", "."): value for name, value in settings.items()}
        try:
            yield deployment
        finally:
            deployment.close()


async def until_workers(client: Client, count: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                if len((await client.status()).workers) >= count:
                    return
            except TimeoutError:  # it knows no processor yet
                pass
            await asyncio.sleep(_LOOK_SECONDS)


def below(pid: int) -> Iterator[int]:
    yield pid
    for child in children(pid):
        yield from below(child)


def children(pid: int) -> Iterator[int]:
    """Yield the processes that a process has started and that have not ended."""
    for path in (_PROC / str(pid) / "task").glob("*/children"):
        try:
            found = path.read_text().split()
        except OSError:
            continue
        yield from map(int, found)


def processor_seconds(pid: int) -> float:
    """Return the processor seconds of one process so far; raises OSError if there is none."""
    return sum(processor_times(pid))


def processor_times(pid: int) -> tuple[float, float]:
    """Return the processor seconds of one process so far, outside and inside the kernel; raises OSError as above."""
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return int(fields[_USER]) / _TICKS_A_SECOND, int(fields[_SYSTEM]) / _TICKS_A_SECOND
