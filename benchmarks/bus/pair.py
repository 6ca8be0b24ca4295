"""The processes of a run: each lives as long as the run, does what it is told, and answers."""

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from benchmarks.bus.orders import Order
from benchmarks.nats_servers import NatsServer, address_of
from tokenbus_services.bus import Role
from tokenbus_services.bus.allowed import new_key, write_keys
from tokenbus_services.bus.keys import create_key, public_key
from tokenbus_services.logs import configure
from tokenbus_services.settings import LogSettings

_ROOT = Path(__file__).resolve().parents[2]
_DEADLINE_SECONDS = 3600.0
"""A million steps of memory take minutes; a process that hangs is not to hold CI for a day."""

S = TypeVar("S")
R = TypeVar("R")
Receive = Callable[[Order, Callable[[str], None]], R]


class TurnFailedError(Exception):
    """A process could not do its part: what it said of that."""


class Child:
    """A process that does one task after the other."""

    def __init__(self, core: int | None) -> None:
        """Start it, on a core of its own if there is one."""
        self.connection, theirs = Pipe()
        command = [sys.executable, "-m", "benchmarks.bus.pair", str(theirs.fileno()), "" if core is None else str(core)]
        self._process = subprocess.Popen(command, cwd=_ROOT, pass_fds=[theirs.fileno()])
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def begin(self, task: Callable[..., object], order: Order) -> None:
        """Let it begin a task."""
        self.connection.send((task, order, False))

    def announced(self, task: Callable[..., object], order: Order) -> str:
        """Let it begin a task that others find at an address, and return that address."""
        self.connection.send((task, order, True))
        address: str = self.answer()
        return address

    def answer(self) -> Any:  # noqa: ANN401 - each task has its own
        """Wait for its next word, or raise a TurnFailedError."""
        if not self.connection.poll(_DEADLINE_SECONDS):
            raise TurnFailedError(f"no answer within {_DEADLINE_SECONDS:.0f} s")
        try:
            kind, answer = self.connection.recv()
        except EOFError:
            raise TurnFailedError(f"the process ended with status {self._process.wait()}") from None
        if kind == "failed":
            raise TurnFailedError(answer)
        return answer

    def close(self) -> None:
        """End it, whatever it waits for."""
        self.connection.close()
        self._process.kill()
        self._process.wait()


class Pair:
    """A sender and a receiver, each on a core of its own where there are two."""

    def __init__(self) -> None:
        """Start both."""
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
        self.cores = cores[-2:] if len(cores) > 1 else []
        first, second = self.cores or (None, None)
        self._folder = tempfile.TemporaryDirectory(prefix="tokenbus-bench-")
        self.sender, self.receiver = Child(first), Child(second)
        self._client: Child | None = None
        self._nats: NatsServer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let all end."""
        for child in (self.sender, self.receiver, self._client):
            if child is not None:
                child.close()
        if self._nats is not None:
            self._nats.kill()
        self._folder.cleanup()

    def address(self, transport: str, name: str) -> str:
        """Return an address to listen at."""
        return "tcp://127.0.0.1:0" if transport == "tcp" else f"ipc://{self._folder.name}/{name}"

    def keys(self) -> str:
        """Return a folder with a key for both processes, and the allow-list that has it."""
        folder = Path(self._folder.name) / "keys"
        if not folder.exists():
            public, _ = create_key(folder, "bench")
            roles = [role.value for role in Role]
            write_keys(folder / "allowed.toml", [new_key("bench", public_key(str(public)).decode(), roles, ["*"])])
        return str(folder)

    def nats(self) -> str:
        """Return where a nats-server process listens, on whichever core is free; raises NotRunError."""
        if self._nats is None:
            self._nats = NatsServer(Path(self._folder.name) / "nats")
        return address_of([self._nats])

    def turn(self, send: Callable[[Order], S], receive: Receive[R], order: Order) -> tuple[S, R]:
        """Let both do their part of one turn."""
        self.sender.begin(send, replace(order, address=self.receiver.announced(receive, order)))
        sent, received = _answers(self.sender, self.receiver)
        return sent, received

    def relayed(
        self, send: Callable[[Order], Any], relay: Receive[Any], receive: Callable[[Order], Any], order: Order
    ) -> tuple[Any, Any, Any]:
        """Let a third process receive what the second one relays; return what the three answer, in this order."""
        if self._client is None:
            self._client = Child(None)
        addresses = self.receiver.announced(relay, order).split()
        there = replace(order, address=addresses[0], clients_address=addresses[1])
        self.sender.begin(send, there)
        self._client.begin(receive, there)
        sent, relayed, received = _answers(self.sender, self.receiver, self._client)
        return sent, relayed, received


def _answers(*children: Child) -> list[Any]:
    """Return what each answers; the first that fails ends the wait for the others."""
    answers: dict[Child, Any] = {}
    while len(answers) < len(children):
        waiting = {child.connection: child for child in children if child not in answers}
        ready = wait(list(waiting), _DEADLINE_SECONDS)
        if not ready:
            raise TurnFailedError(f"no answer within {_DEADLINE_SECONDS:.0f} s")
        for connection in ready:
            if isinstance(connection, Connection):
                answers[waiting[connection]] = waiting[connection].answer()
    return [answers[child] for child in children]


def _end_with_the_parent(connection: Connection) -> None:
    """End this process, whatever it waits for, when the connection's other end is closed."""
    closing = select.poll()
    closing.register(connection, 0)  # for no event but the connection's end, which is always reported
    closing.poll()
    os._exit(1)


def main() -> None:
    """Do what comes over the connection that was inherited, until it is closed."""
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_with_the_parent, args=[connection], name="lifeline", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this ends it
    if sys.argv[2]:
        os.sched_setaffinity(0, {int(sys.argv[2])})
    configure(LogSettings(level="warning"))
    while True:
        try:
            task, order, announces = connection.recv()
        except EOFError:
            return
        try:
            more = (lambda address: connection.send(("ready", address)),) if announces else ()
            answer = ("done", task(order, *more))
        except Exception:  # noqa: BLE001 - whatever it is, it belongs to who gave the task
            answer = ("failed", traceback.format_exc())
        connection.send(answer)


if __name__ == "__main__":
    main()
