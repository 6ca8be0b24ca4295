"""A System V message queue through libc, with limits high enough for FastDeploy's struct.

The kernel's defaults (8 KiB a message) are too low for it. Instead of changing the machine's own limits, the calling
thread moves into a new IPC namespace, raises the limits there, and moves back when it is done.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.errors import NotRunError
from benchmarks.workload import Array

_CLONE_NEWIPC = 0x08000000
_IPC_PRIVATE, _IPC_RMID, _IPC_CREAT = 0, 0, 0o1000
_OWNER_ONLY = 0o600
_SYSCTL = Path("/proc/sys/kernel")
_TYPE_BYTES = ctypes.sizeof(ctypes.c_long)

_libc = ctypes.CDLL(None, use_errno=True)


class Queue:
    """A queue of its own, for one struct at a time. A struct begins with its type, a long."""

    def __init__(self, identity: int | None = None) -> None:
        for call in (_libc.msgsnd, _libc.msgrcv):
            call.restype = ctypes.c_ssize_t
        _libc.msgsnd.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        _libc.msgrcv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long, ctypes.c_int]
        if identity is None:
            identity = _checked("msgget", _libc.msgget(_IPC_PRIVATE, _IPC_CREAT | _OWNER_ONLY))
        self.identity = identity

    def send(self, struct: Array) -> None:
        sent = _libc.msgsnd(self.identity, struct.ctypes.data, struct.nbytes - _TYPE_BYTES, 0)
        _checked("msgsnd", sent)

    def receive(self, struct: Array) -> None:
        _checked("msgrcv", _libc.msgrcv(self.identity, struct.ctypes.data, struct.nbytes - _TYPE_BYTES, 0, 0))

    def remove(self) -> None:
        _checked("msgctl", _libc.msgctl(self.identity, _IPC_RMID, None))


@contextmanager
def queue_for(message_bytes: int) -> Iterator[Queue]:
    """Yield a queue that takes messages of this size, or raise NotRunError where none may be had."""
    with _limits_for(message_bytes):
        queue = Queue()
        try:
            yield queue
        finally:
            queue.remove()


@contextmanager
def _limits_for(message_bytes: int) -> Iterator[None]:
    if not _SYSCTL.joinpath("msgmax").exists():
        raise NotRunError("not run: this system has no System V message queues")
    most = min(_limit("msgmax"), _limit("msgmnb"))
    if most >= message_bytes:
        yield
        return
    home = os.open("/proc/self/ns/ipc", os.O_RDONLY)
    try:
        try:
            _checked("unshare", _libc.unshare(_CLONE_NEWIPC))
        except OSError as error:
            raise _refused(message_bytes, error) from None
        try:
            try:
                for name in ("msgmax", "msgmnb"):
                    _SYSCTL.joinpath(name).write_text(str(message_bytes))
            except OSError as error:
                raise _refused(message_bytes, error) from None
            yield
        finally:
            _checked("setns", _libc.setns(home, _CLONE_NEWIPC))
    finally:
        os.close(home)


def _refused(message_bytes: int, error: OSError) -> NotRunError:
    limits = f"kernel.msgmax is {_limit('msgmax')}, msgmnb {_limit('msgmnb')}"
    return NotRunError(f"not run: {limits}, the struct needs {message_bytes}, and raising them failed ({error})")


def _limit(name: str) -> int:
    return int(_SYSCTL.joinpath(name).read_text())


def _checked(call: str, result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result
