"""Listening sockets of the kernel, made here rather than by libzmq.

libzmq takes a path away from whoever listens there, deletes a path that may be another's by then, and says little about
what is wrong with an address.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Any

from tokenbus_services.bus.addresses import IpcEndpoint, TcpEndpoint, parse
from tokenbus_services.bus.errors import AddressError

_BACKLOG = 128
_LOCK_TRIES = 10
_TAKEN = "taken: something listens there already"
_REASONS = {
    errno.EADDRINUSE: _TAKEN,
    errno.EADDRNOTAVAIL: "no address of this machine",
    errno.EACCES: "not permitted",
    errno.EPERM: "not permitted",
    errno.ENOENT: "no such directory",
    errno.ENOTDIR: "no such directory",
}


class Binding:
    """A socket that listens, and the lock on its path if it has one."""

    def __init__(self, endpoint: TcpEndpoint | IpcEndpoint, listening: socket.socket, lock: "_PathLock | None") -> None:
        """Take a socket that listens already."""
        self.address = str(endpoint)
        self.descriptor = listening.fileno()
        self._listening = listening
        self._lock = lock
        self._socket_file = endpoint.path.stat() if isinstance(endpoint, IpcEndpoint) else None

    def hand_over(self) -> None:
        """Let another close the descriptor."""
        self._listening.detach()

    def release(self) -> None:
        """Close what was not handed over, and let others have the path."""
        self._listening.close()
        if self._lock is not None:
            self._lock.release(self._socket_file)


async def bind(address: str) -> Binding:
    """Listen at an address, or raise an AddressError."""
    endpoint = parse(address)
    try:
        return await _bind_tcp(endpoint) if isinstance(endpoint, TcpEndpoint) else _bind_ipc(endpoint)
    except socket.gaierror as error:
        raise AddressError(address, f"no such host here: {(error.strerror or str(error)).lower()}") from None
    except OSError as error:
        reason = _REASONS.get(error.errno or 0) or (error.strerror or str(error)).lower()
        raise AddressError(address, reason) from None


async def _bind_tcp(endpoint: TcpEndpoint) -> Binding:
    family = socket.AF_INET6 if endpoint.is_v6 else socket.AF_INET
    found = await asyncio.get_running_loop().getaddrinfo(
        None if endpoint.host == "*" else endpoint.host,
        endpoint.port,
        family=family,
        type=socket.SOCK_STREAM,
        flags=socket.AI_PASSIVE,
    )
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _listen(listening, found[0][4])
    except BaseException:
        listening.close()
        raise
    host, port = listening.getsockname()[:2]
    return Binding(TcpEndpoint(host, port, is_v6=endpoint.is_v6), listening, None)


def _bind_ipc(endpoint: IpcEndpoint) -> Binding:
    lock = _PathLock(endpoint.path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _clear_path(endpoint.path)
        _listen(listening, str(endpoint.path))
    except BaseException:
        listening.close()
        lock.release()
        raise
    return Binding(endpoint, listening, lock)


def _listen(listening: socket.socket, where: str | tuple[Any, ...]) -> None:
    listening.setblocking(False)  # noqa: FBT003 - libzmq's thread must not wait for a connection that left before it was taken
    listening.bind(where)
    listening.listen(_BACKLOG)


def _clear_path(path: Path) -> None:
    """Remove the socket file that a process left behind when it died; refuse to remove anything else."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "there is something else than a socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise OSError(errno.EADDRINUSE, _TAKEN)  # by somebody who does not know of our locks


class _PathLock:
    """A lock that dies with its process, on a file beside the path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.with_name(path.name + ".lock")
        for _ in range(_LOCK_TRIES):
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_current():
                    return
            except BlockingIOError:
                os.close(self._descriptor)
                raise OSError(errno.EADDRINUSE, _TAKEN) from None
            except BaseException:
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)
        raise OSError(errno.EADDRINUSE, _TAKEN)

    def release(self, ours: os.stat_result | None = None) -> None:
        """Remove our files and let others have the path; files are another's if ours were removed by hand."""
        if ours is not None and _is_at(self._path, ours):
            self._path.unlink(missing_ok=True)
        if self._is_current():
            self._file.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _is_current(self) -> bool:
        """Tell whether the locked file is still the one in the folder: who had it before removed it."""
        return _is_at(self._file, os.fstat(self._descriptor))


def _is_at(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), status)
    except FileNotFoundError:
        return False
