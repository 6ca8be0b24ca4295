"""EncoderPool: reads and tokenizes request bodies in other processes, with bounds on memory and time."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from itertools import count
from typing import NamedTuple

import msgspec

from tokenbus.gateway.bridging import FindTurn, Turn
from tokenbus.gateway.encoder_process import (
    DEFECT,
    ENDED,
    ERROR,
    FORK,
    KILL,
    LENGTH,
    NONE,
    ORDER,
    TURN,
    Bounds,
    Job,
    Reply,
)
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.fairness import FairTurns
from tokenbus.gateway.vocabulary import is_folder
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.settings import Settings

_log = logger("gateway")
_MODULE = "tokenbus.gateway.encoder_process"
_QUICK_BYTES = 65_536
"""Bodies above this size skip the quick lane. The slowest measured tokenizer needs 30 ms and 15 MiB for this size."""
_QUICK_MEMORY_BYTES = 32 * 2**20
_QUICK_SECONDS = 0.1
_QUICK_ENCODERS, _SLOW_ENCODERS = 2, 1
_RESTART_SECONDS = 1.0
_LEAVE_SECONDS = 5
_READ_BYTES = 4096
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Environment variables that keep libraries from starting threads, because a process with threads must not fork."""


def no_turn(_session: str, _digest: bytes) -> Turn | None:
    return None


class Task(NamedTuple):
    """A body to read."""

    job: bytes
    body: bytearray
    find: FindTurn
    """The function that answers an encoder's request for a session's last turn."""


class _EndedError(Exception):
    """An encoder ended before its reply. `status` is the exit status, or None if the fork server is gone."""

    def __init__(self, status: int | None) -> None:
        super().__init__(status)
        self.status = status

    @property
    def why(self) -> str:
        """The reason why the encoder ended: `time` or `memory` if a bound was exceeded, or else `killed`."""
        if self.status in {None, 0, -signal.SIGKILL}:
            return "killed"
        return "time" if self.status == -signal.SIGPROF else "memory"


class EncoderPool:
    """Two groups of encoder processes, called lanes, so that cheap bodies never wait for costly bodies.

    Short bodies begin in the quick lane, which has narrow bounds of time and memory. Long bodies, and bodies that
    exceed these bounds, go to the slow lane.
    """

    def __init__(self, settings: Settings, repeated_log: DeduplicatedLog) -> None:
        gateway = settings.gateway
        self._settings = settings
        self._log = repeated_log
        memory, seconds = gateway.encoding_memory_bytes, gateway.encoding_time_ms / 1000
        quick = Bounds(min(_QUICK_MEMORY_BYTES, memory), min(_QUICK_SECONDS, seconds), is_for_one=False)
        slow = Bounds(memory, seconds, is_for_one=True)
        self._quick = Lane(quick, _QUICK_ENCODERS, gateway.retry_after_ms)
        self._slow = Lane(slow, _SLOW_ENCODERS, gateway.retry_after_ms)
        self.lanes = {"quick": self._quick, "slow": self._slow}
        self._server: _Server | None = None
        self._started_at = -_RESTART_SECONDS
        self._leaving: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the processes unless they run. Bodies may arrive while the processes load the tokenizer."""
        before, now = self._server, time.monotonic()
        if (before is None or before.is_gone) and now - self._started_at >= _RESTART_SECONDS:
            self._started_at = now
            if before is not None:
                self._log.begin("gone", _log.error, "the encoder's processes ended and are started again")
                self._leave(before)
            try:
                self._server = _Server(self._settings)
            except OSError as error:  # too many processes, too many open files, or no memory
                self._log.begin("start", _log.error, "the encoder's processes cannot be started", reason=str(error))
                return
            for lane in self.lanes.values():
                lane.start(self._server)

    async def close(self) -> None:
        if self._server is not None:
            self._leave(self._server)
            for lane in self.lanes.values():
                lane.stop()
        await asyncio.gather(*self._leaving)

    async def read(self, job: Job, body: bytearray, who: Hashable, find: FindTurn = no_turn) -> Reply:
        """Return the reader's result for a body. Clients take turns.

        Cancelling kills the encoder. Raises an ApiError if the body is refused, or a RuntimeError for a defect.
        """
        milliseconds = self._settings.gateway.request_timeout_ms
        try:
            async with asyncio.timeout(milliseconds / 1000):
                return _result(await self._reply(Task(msgspec.msgpack.encode(job), body, find), who))
        except TimeoutError:
            message = f"body: encoded within {milliseconds} ms, including the bodies before it"
            raise self._busy(message) from None
        except _EndedError as ended:
            self._log.begin(ended.status, _log.warning, "an encoder process ended", status=ended.status)
            raise self._error_of(ended) from None

    async def _reply(self, task: Task, who: Hashable) -> bytes:
        if len(task.body) <= _QUICK_BYTES:
            try:
                return await self._ask(self._quick, task, who)
            except _EndedError as ended:
                if ended.why == "killed":
                    raise
        return await self._ask(self._slow, task, who)

    async def _ask(self, lane: "Lane", task: Task, who: Hashable) -> bytes:
        async with lane.turns.of(who):
            self.start()
            if self._server is not None:
                await self._server.is_ready.wait()
            return await lane.ask(task)

    def _error_of(self, ended: "_EndedError") -> ApiError:
        if ended.why == "killed":
            return self._busy("body: the process that encoded its text was killed; another one replaces it")
        gateway = self._settings.gateway
        if ended.why == "time":
            most = f"{gateway.encoding_time_ms} ms of processor time"
        else:
            most = f"{gateway.encoding_memory_bytes} bytes of memory"
        message = f"body: at most {most} to encode its text, got more"
        return ApiError(400, message, code="too_costly")

    def _busy(self, message: str) -> ApiError:
        return ApiError(503, message, code="overloaded", retry_after_ms=self._settings.gateway.retry_after_ms)

    def _leave(self, server: "_Server") -> None:
        task = asyncio.create_task(server.close())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


@contextlib.asynccontextmanager
async def encoders_of(settings: Settings, repeated_log: DeduplicatedLog) -> AsyncIterator[EncoderPool]:
    encoders = EncoderPool(settings, repeated_log)
    if is_folder(settings.gateway.tokenizer):  # without a folder, encoding is quick and runs in this process
        encoders.start()
    try:
        yield encoders
    finally:
        await encoders.close()


def _result(reply: bytes) -> Reply:
    kind, rest = reply[:1], reply[1:]
    if kind == ERROR:
        status, message, param, code = msgspec.msgpack.decode(rest)
        raise ApiError(status, message, param=param, code=code)
    if kind == DEFECT:
        raise RuntimeError(rest.decode())
    return msgspec.msgpack.decode(rest, type=Reply)


class Lane:
    """Encoders with the same bounds. Each encoder reads one body at a time."""

    def __init__(self, bounds: Bounds, size: int, retry_after_ms: int) -> None:
        self._bounds = bounds
        self._size = size
        self.turns = FairTurns(size, retry_after_ms)
        self.ended = Counter(time=0, memory=0, left=0, killed=0)
        """Number of encoders that ended before replying, by reason. The reason is `left` if the client left."""
        self._idle: list[_Encoder] = []
        self._server: _Server | None = None

    def start(self, server: "_Server") -> None:
        self.stop()
        self._server = server
        for _ in range(self._size):
            self._add()

    def stop(self) -> None:
        for each in self._idle:
            each.close()
        self._idle = []

    async def ask(self, task: Task) -> bytes:
        """Return the reply to a body. The caller must have a turn from `turns`. Raises an _EndedError."""
        server, encoder = self._server, self._next()
        may_stay = False
        try:
            reply = await encoder.ask(task)
            may_stay = not self._bounds.is_for_one
        except _EndedError as ended:
            self.ended[ended.why] += 1
            raise
        except asyncio.CancelledError:
            self.ended["left"] += 1
            raise
        finally:
            if may_stay and server is self._server:
                self._idle.append(encoder)
            else:
                encoder.end()
                self._add()
        return reply

    def _next(self) -> "_Encoder":
        while self._idle and self._idle[-1].status.done():  # the encoder ended while it was idle
            self._idle.pop().close()
        if not self._idle:
            self._add()
        if not self._idle:
            raise _EndedError(None)
        return self._idle.pop()

    def _add(self) -> None:
        if self._server is not None and len(self._idle) < self._size:
            with contextlib.suppress(OSError):  # too many open files: the next call tries again
                self._idle.append(self._server.fork(self._bounds))


class _Encoder:
    def __init__(self, server: "_Server", number: int, end: socket.socket) -> None:
        self._server = server
        self._number = number
        self._end = end
        self.status: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    async def ask(self, task: Task) -> bytes:
        loop, (job, body, find) = asyncio.get_running_loop(), task
        try:
            first = _QUICK_BYTES  # slicing copies, so slice only a small part of a body
            await loop.sock_sendall(self._end, LENGTH.pack(len(job)) + job + LENGTH.pack(len(body)) + body[:first])
            if len(body) > first:
                await loop.sock_sendall(self._end, memoryview(body)[first:])
            return await self._reply(find)
        except (ConnectionError, EOFError):
            raise _EndedError(await asyncio.shield(self.status)) from None

    async def _reply(self, find: FindTurn) -> bytes:
        while True:
            (size,) = LENGTH.unpack(await self._receive(LENGTH.size))
            reply = await self._receive(size)
            if reply[:1] != TURN:
                return reply
            session, digest = msgspec.msgpack.decode(reply[1:], type=tuple[str, bytes])
            found = msgspec.msgpack.encode(find(session, digest))
            await asyncio.get_running_loop().sock_sendall(self._end, LENGTH.pack(len(found)) + found)

    async def _receive(self, size: int) -> bytes:
        loop, data = asyncio.get_running_loop(), bytearray(size)
        view = memoryview(data)
        while view:
            count = await loop.sock_recv_into(self._end, view)
            if not count:
                raise EOFError
            view = view[count:]
        return bytes(data)

    def end(self) -> None:
        self.close()
        if not self.status.done():
            self._server.order(KILL, self._number)

    def close(self) -> None:
        self._end.close()


class _Server:
    """The process of the fork server, and its running encoders."""

    def __init__(self, settings: Settings) -> None:
        self.is_gone = False
        self.is_ready = asyncio.Event()
        """Set when the fork server has loaded the tokenizer or is gone. Orders sent before that would pile up."""
        self._loop = asyncio.get_running_loop()
        self._control, its_end = socket.socketpair()
        self._numbers = count(1)
        self._encoders: dict[int, _Encoder] = {}
        self._received = b""
        with its_end:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, and a module of this package
                # -P keeps files in the working folder from replacing modules.
                (sys.executable, "-P", "-m", _MODULE, str(its_end.fileno())),
                stdin=subprocess.DEVNULL,
                pass_fds=[its_end.fileno()],
                env=os.environ | _ONE_THREAD,
            )
        described = json.dumps(settings.describe()).encode()
        self._control.sendall(LENGTH.pack(len(described)) + described)
        self._control.setblocking(False)  # noqa: FBT003 - a name of the standard library's
        self._loop.add_reader(self._control, self._read)

    def fork(self, bounds: Bounds) -> _Encoder:
        ours, its_end = socket.socketpair()
        ours.setblocking(False)  # noqa: FBT003 - a name of the standard library's
        number = next(self._numbers)
        self._encoders[number] = encoder = _Encoder(self, number, ours)
        with its_end:
            self.order(FORK, number, bounds, its_end.fileno())
        return encoder

    def order(self, what: int, number: int, bounds: Bounds = NONE, *descriptors: int) -> None:
        """Send an order to the fork server. If the server is gone, mark the encoder as ended."""
        try:
            if not self.is_gone:
                socket.send_fds(self._control, [ORDER.pack(what, number, *bounds)], descriptors)
        except OSError:  # the server is gone, or has stopped reading
            self._lose()
        if self.is_gone:
            self._ended(number, None)

    async def close(self) -> None:
        self._lose()
        try:
            await asyncio.to_thread(self._process.wait, _LEAVE_SECONDS)
        except subprocess.TimeoutExpired:  # the server hangs
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def _read(self) -> None:
        try:
            data = self._control.recv(_READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            self._lose()
        self._received += data
        while len(self._received) >= ENDED.size:
            self.is_ready.set()
            self._ended(*ENDED.unpack_from(self._received))
            self._received = self._received[ENDED.size :]

    def _ended(self, number: int, status: int | None) -> None:
        encoder = self._encoders.pop(number, None)
        if encoder is not None:
            encoder.status.set_result(status)

    def _lose(self) -> None:
        """Stop using the server. The encoders end when their sockets close or their time is up."""
        if not self.is_gone:
            self.is_gone = True
            self.is_ready.set()
            self._loop.remove_reader(self._control)
            self._control.close()
            for number in list(self._encoders):
                self._ended(number, None)
