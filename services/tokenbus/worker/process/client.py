"""PublisherProcess: starts a publisher in another process, and replaces a publisher that dies."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import asdict
from math import inf
from typing import IO, cast

from tokenbus.bus import AddressError
from tokenbus.bus.link import PROOF_BYTES
from tokenbus.logs import logger
from tokenbus.settings import Settings
from tokenbus.worker.engine import NO_DESCRIPTION, EngineDescription
from tokenbus.worker.errors import NotRunningError
from tokenbus.worker.process.memory import SharedMemory, shared_file
from tokenbus.worker.process.records import READY, WAKE
from tokenbus.worker.process.shared_memory_publisher import SharedMemoryPublisher

_log = logger("worker")
_START_SECONDS = 60.0
_FIRST_STARTS = 3
_LOOK_SECONDS = 0.5
_ERROR_SECONDS = 1.0  # time limit for a publisher to leave after an exception ended the `with` block
_MAX_PAUSE_SECONDS = 5.0


class PublisherProcess(SharedMemoryPublisher):
    """A publisher in another process, which runs within a `with` block.

    When the engine's process dies, the publisher publishes the remaining records, ends the open requests, and leaves.
    When the publisher dies, the engine goes on, and a new publisher takes over all records and unacknowledged items.
    """

    def __init__(
        self,
        settings: Settings,
        vocabulary_size: int = 0,
        description: EngineDescription = NO_DESCRIPTION,
        *,
        in_background: bool = False,
    ) -> None:
        """Map the memory. The `with` statement starts the publisher.

        `with` waits until the publisher has started. `with` raises AddressError if an address cannot be used, and
        NotRunningError if the process repeatedly fails to start. If `in_background` is set, `with` returns at once,
        steps wait in the memory, and failed starts are repeated.
        """
        self._file = shared_file(settings)
        memory = SharedMemory(self._file, settings)
        memory.warm()
        super().__init__(settings, memory, time.time_ns())
        self._introduction = {
            "settings": asdict(settings),
            "vocabulary_size": vocabulary_size,
            "description": asdict(description),
            "epoch": self.epoch,
            "proof": secrets.token_hex(PROOF_BYTES),
            "engine": os.getpid(),
        }
        self._in_background = in_background
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._next_bell: socket.socket | None = None
        self._keeper: socket.socket | None = None  # receives a duplicate of each connection that the publisher opens
        self._held_connection = -1
        """Duplicate of the last publisher's connection, which stays open until a new publisher starts, or -1."""
        self._hold_until = inf
        self._given_up = threading.Event()  # set when dead publishers are no longer replaced
        self._watching = threading.Thread(target=self._watch, name="tokenbus-publisher", daemon=True)

    def __enter__(self) -> "PublisherProcess":
        _started.add(self)
        try:
            if not self._in_background:
                self._start_first()
        except BaseException:
            self.close_descriptors()
            raise
        self.is_running = True
        self._watching.start()
        return self

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if os.getpid() != self._owner:
            return  # this process is the child of a fork
        seconds = _ERROR_SECONDS
        if error is None:
            seconds = self.settings.worker.drain_timeout_ms / 1000
            self.leave(seconds)
            seconds += _MAX_PAUSE_SECONDS
        else:
            self.is_running = False
            self._given_up.set()
            _close(self.bell)  # the publisher then behaves as if the engine had died
        self._watching.join(seconds)
        self._given_up.set()
        self._kill()
        self._watching.join()
        self.close_descriptors()

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def close_descriptors(self) -> None:
        """Close all descriptors. Otherwise, a forked child's descriptors would keep the publisher alive."""
        _started.discard(self)
        self.is_running = False
        _close(self.bell)
        _close(self._next_bell)
        _close(self._keeper)
        self._hold(-1)
        os.close(self._file)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _start_first(self) -> None:
        began = time.monotonic()
        for _ in range(_FIRST_STARTS - 1):
            try:
                self._start()
            except NotRunningError as error:
                if time.monotonic() - began > _START_SECONDS:
                    raise
                self._log_failed_start(error)
            else:
                return
        self._start()

    def _start(self) -> None:
        with _forking:
            ours, theirs = socket.socketpair()
            _close(self._keeper)
            self._keeper, keeping = socket.socketpair()
            self._next_bell = ours
            with theirs, keeping:
                files = [self._file, theirs.fileno(), keeping.fileno()]
                process = subprocess.Popen(  # noqa: S603 - this very package
                    [sys.executable, "-m", "tokenbus.worker.process", *map(str, files)],
                    stdin=subprocess.PIPE,
                    pass_fds=files,
                    start_new_session=True,  # signals to the engine's process group must not reach the publisher
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"},
                )
            with contextlib.suppress(BrokenPipeError), cast("IO[bytes]", process.stdin) as stdin:
                stdin.write(json.dumps({**self._introduction, **self.state()}).encode() + b"\n")
        try:
            self._wait_until_ready(ours, process)
        except BaseException:
            process.kill()
            process.wait()
            ours.close()
            raise
        before, self.bell, self._process = self.bell, ours, process
        _close(before)
        self.has_publisher.set()

    def _wait_until_ready(self, bell: socket.socket, process: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + _START_SECONDS
        bell.settimeout(_LOOK_SECONDS)
        received = b""
        while not received.endswith(READY):
            try:
                more = bell.recv(4096)
            except TimeoutError:
                self._drop_held_if_expired()
                if self._given_up.is_set() or time.monotonic() > deadline:
                    slow = f"the publisher's process did not publish within {_START_SECONDS:g} s"
                    raise NotRunningError(slow) from None
                if process.poll() is None:
                    continue
                more = b""  # the publisher died, but a forked child still has its end of the socket
            if not more and received.startswith(b"["):
                raise AddressError(*json.loads(received))
            if not more:
                ended = f"the publisher's process ended with status {process.wait()} before it published"
                raise NotRunningError(f"{ended}; its log may say why")
            received += more.strip(WAKE)
        bell.settimeout(0)

    def _watch(self) -> None:
        """Replace each publisher that dies, until a publisher leaves on purpose."""
        pause = self._start_if_none(0.0)
        while (process := self._process) is not None:
            taken = self._steps.taken
            self._hold_connections()
            status = process.wait()
            self._hold_until = time.monotonic() + self.settings.bus.heartbeat_timeout_ms / 1000
            self.has_publisher.clear()
            if self._given_up.is_set() or (status == 0 and not self.is_running):
                return
            worker = self.settings.worker.id
            _log.error("the publisher's process died; a new one takes over", status=status, worker=worker)
            if self._steps.taken > taken:
                pause = 0.0  # a working publisher must be replaced within the heartbeat timeout
            pause = self._start_if_none(pause)

    def _start_if_none(self, pause: float) -> float:
        """Start a publisher if there is none, and return the next pause. Each failure makes the next pause longer."""
        while not self.has_publisher.is_set() and not self._given_up.wait(pause):
            pause = min(_MAX_PAUSE_SECONDS, 2 * pause + 0.05)
            self._drop_held_if_expired()
            try:
                self._start()
                if self._given_up.is_set():
                    self._kill()
            except (AddressError, NotRunningError, OSError) as error:
                self._log_failed_start(error)
        return pause

    def _hold_connections(self) -> None:
        """Keep a duplicate of the publisher's last connection until the publisher's process has ended."""
        with contextlib.suppress(OSError):  # this process is closing its sockets
            while self._keeper is not None and (
                files := socket.recv_fds(self._keeper, 1, 1, socket.MSG_CMSG_CLOEXEC)[1]
            ):
                self._hold(*files)

    def _hold(self, connection: int) -> None:
        before, self._held_connection = self._held_connection, connection
        if before >= 0:
            os.close(before)

    def _drop_held_if_expired(self) -> None:
        """Close the duplicate connection after a heartbeat timeout without a publisher."""
        if time.monotonic() >= self._hold_until:
            self._hold(-1)

    def _log_failed_start(self, error: Exception) -> None:
        _log.error("the publisher's process cannot start", reason=str(error), worker=self.settings.worker.id)


def _close(bell: socket.socket | None) -> None:
    if bell is not None:
        bell.close()


_started: weakref.WeakSet[PublisherProcess] = weakref.WeakSet()
_forking = threading.Lock()  # held while a publisher starts, because a forked child would inherit the publisher's pipes


def _after_fork_in_child() -> None:
    _forking.release()
    for each in list(_started):
        each.close_descriptors()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_after_fork_in_child)
