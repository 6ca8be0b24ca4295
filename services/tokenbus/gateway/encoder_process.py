"""The fork server: loads the tokenizer once, and forks the encoders, which read and tokenize request bodies.

Start the server with `python -m tokenbus.gateway.encoder_process CONTROL`. CONTROL is the file descriptor of a socket
on which the gateway sends the settings as JSON, and then orders. The kernel bounds the memory and the processor time of
each encoder. An encoder that exceeds a bound ends without affecting other processes.
"""

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenbus.gateway.bridging import Turn
from tokenbus.gateway.completion_request import BodyHeaders, Reader
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.validation import parse_json
from tokenbus.gateway.vocabulary import vocabulary_of
from tokenbus.settings import Settings, SettingsError

FORK, KILL = 1, 2
ORDER = struct.Struct("<BIQd?")
"""An order: FORK with an encoder's number, bounds and socket, or KILL with an encoder's number."""
ENDED = struct.Struct("<Ii")
"""A report: an encoder's number and exit status, negative for a signal. Number 0 reports that the server is ready."""
LENGTH = struct.Struct("<I")
OUT_OF_MEMORY = 86
RESULT, ERROR, DEFECT, TURN = b"=", b"!", b"?", b"<"
"""The kinds of replies. TURN asks the gateway for a session's last turn, and precedes the reply to the body."""
_NICE = 5
"""Niceness of the encoders: on a busy machine, streams have priority over reading bodies."""
_STATM = Path("/proc/self/statm")


class Bounds(NamedTuple):
    """The limits of an encoder."""

    memory_bytes: int
    seconds: float
    is_for_one: bool
    """Whether the encoder exits after one body in order to free its memory."""


NONE = Bounds(0, 0, is_for_one=False)


class Job(msgspec.Struct, array_like=True):
    """The instructions for reading the next body."""

    kind: str
    models: dict[str, int]
    parents: dict[str, str]
    headers: BodyHeaders = BodyHeaders()


class Reply(msgspec.Struct, array_like=True):
    """The reader's result for a body."""

    data: bytes
    ignored: list[str]


def answer(reader: Reader, job: Job, body: bytes) -> bytes:
    """Return the reply to a body: the reader's result, the reader's error, or a traceback."""
    reader.models, reader.parents, reader.headers = job.models, job.parents, job.headers
    try:
        result = getattr(reader, job.kind)(parse_json(body))
        data = result if isinstance(result, bytes) else result.packed()
        return RESULT + msgspec.msgpack.encode(Reply(data, reader.types.ignored))
    except ApiError as error:
        return ERROR + msgspec.msgpack.encode([error.status, error.message, error.param, error.code])
    except BaseException as error:  # noqa: BLE001 - the gateway logs it as a defect of its own
        _leave_if_out_of_memory(error)
        return DEFECT + traceback.format_exc().encode()


def _leave_if_out_of_memory(error: BaseException | None) -> None:
    while error is not None:
        if isinstance(error, MemoryError):  # possibly as the cause of orjson's SystemError
            os._exit(OUT_OF_MEMORY)
        error = error.__cause__ or error.__context__


def receive(end: socket.socket) -> bytes:
    size = LENGTH.unpack(end.recv(LENGTH.size, socket.MSG_WAITALL).ljust(LENGTH.size, b"\0"))[0]
    data = bytearray(size)
    return bytes(data) if end.recv_into(data, flags=socket.MSG_WAITALL) == size else b""


def work(end: socket.socket, reader: Reader, bounds: Bounds) -> None:
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if _STATM.exists():  # other kernels do not enforce RLIMIT_AS
        most = int(_STATM.read_text().split()[0]) * resource.getpagesize() + bounds.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    decoder = msgspec.msgpack.Decoder(Job)
    if reader.bridge is not None:
        reader.bridge.find = partial(_turn_of, end)
    while job := receive(end):
        body = receive(end)
        # SIGPROF ends the process after its processor time is used up, even inside a library.
        signal.setitimer(signal.ITIMER_PROF, bounds.seconds)
        reply = answer(reader, decoder.decode(job), body)
        signal.setitimer(signal.ITIMER_PROF, 0)
        end.sendall(LENGTH.pack(len(reply)) + reply)
        if bounds.is_for_one:
            return
        del body, reply


def _turn_of(end: socket.socket, session: str, digest: bytes) -> Turn | None:
    asked = TURN + msgspec.msgpack.encode((session, digest))
    end.sendall(LENGTH.pack(len(asked)) + asked)
    return msgspec.msgpack.decode(receive(end), type=Turn | None)


class ForkServer:
    """Forks and kills encoders on the gateway's orders, and reports their exits. Forking requires a single thread."""

    def __init__(self, control: socket.socket, reader: Reader) -> None:
        self._control = control
        self._reader = reader
        self._numbers: dict[int, int] = {}
        self._woken, self._waker = socket.socketpair()

    def run(self) -> None:
        """Execute orders until the gateway is gone, then kill all encoders."""
        for each in (self._woken, self._waker):
            each.setblocking(False)  # noqa: FBT003 - a name of the standard library's
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        with contextlib.suppress(ConnectionError):  # the gateway is gone
            self._control.sendall(ENDED.pack(0, 0))
            is_there = True
            while is_there:
                ready, _, _ = select.select([self._control, self._woken], [], [])
                if self._woken in ready:
                    self._woken.recv(4096)
                    self._reap()
                is_there = self._control not in ready or self._obey()
        signal.set_wakeup_fd(-1)
        for process in self._numbers:
            os.kill(process, signal.SIGKILL)

    def _obey(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, ORDER.size, 1, socket.MSG_WAITALL)
        if len(data) < ORDER.size:
            return False
        what, number, *bounds = ORDER.unpack(data)
        if what == FORK:
            with socket.socket(fileno=descriptors[0]) as end:
                self._fork(number, end, Bounds(*bounds))
        for process in [process for process, each in self._numbers.items() if each == number and what == KILL]:
            os.kill(process, signal.SIGKILL)  # the process id cannot be reused before it is reaped
        return True

    def _fork(self, number: int, end: socket.socket, bounds: Bounds) -> None:
        try:
            process = os.fork()
        except OSError:  # too many processes or no memory
            self._control.sendall(ENDED.pack(number, -signal.SIGKILL))
            return
        if process:
            self._numbers[process] = number
            return
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (self._control, self._woken, self._waker):
            each.close()
        # Discard messages of libraries that run out of memory. The gateway logs the end of the encoder.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            work(end, self._reader, bounds)
        except ConnectionError:  # the gateway is gone
            pass
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        finally:
            os._exit(0)

    def _reap(self) -> None:
        while self._numbers:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                return
            number = self._numbers.pop(process)
            self._control.sendall(ENDED.pack(number, os.waitstatus_to_exitcode(status)))


def main(arguments: Sequence[str]) -> int:
    # Ignore Ctrl-C, which a terminal sends to all processes: this process stops with the gateway.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(fileno=int(arguments[0])) as control:
        settings = Settings.load(environment={}, overrides=json.loads(receive(control)))
        try:
            reader = Reader(settings, vocabulary_of(settings.gateway.tokenizer))
        except SettingsError:  # the gateway reports the error, because it loads the tokenizer too
            return 1
        gc.collect()
        gc.freeze()  # a garbage collection would copy memory pages that processes share
        ForkServer(control, reader).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
