"""Listening sockets, which Tokenbus binds itself because libzmq binds them unsafely.

libzmq replaces another process's socket at the same path. On close, libzmq deletes the path even if another process
owns it now. The errors of libzmq hardly explain why an address cannot be used.
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

from tokenbus.bus.addresses import IpcEndpoint, TcpEndpoint, parse
from tokenbus.bus.errors import AddressError
from tokenbus.printable import reason_of

_BACKLOG = 4096  # number of peers that may wait for `accept`, for example after a restart; others retry a second later
_LOCK_TRIES = 10
_OTHERS_WRITE = 0o022
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
    """A listening socket, with the lock on its path if it is a Unix socket."""

    def __init__(self, endpoint: TcpEndpoint | IpcEndpoint, listening: socket.socket, lock: "_PathLock | None") -> None:
        self.address = str(endpoint)
        self.descriptor = listening.fileno()
        self._listening = listening
        self._lock = lock
        self._file = (endpoint.path, endpoint.path.stat()) if isinstance(endpoint, IpcEndpoint) else None

    def is_reachable(self) -> bool:
        """Return False if the socket's file was removed or replaced, so that no connection can reach the socket."""
        return self._file is None or _is_at(*self._file)

    def hand_over(self) -> None:
        """Release the descriptor without closing it; its new owner must close it."""
        self._listening.detach()

    def release(self) -> None:
        """Close the socket unless `hand_over` was called, and release the path."""
        self._listening.close()
        if self._lock is not None:
            self._lock.release(self._file[1] if self._file else None)


async def bind(address: str, *, reuse_port: bool = False) -> Binding:
    """Listen at an address; raises AddressError if the address cannot be used.

    With `reuse_port`, a TCP socket is bound but does not listen yet. Once the caller makes it listen, the kernel
    distributes the port's connections among all sockets on that port.
    """
    endpoint = parse(address)
    try:
        if isinstance(endpoint, TcpEndpoint):
            return await _bind_tcp(endpoint, reuse_port=reuse_port)
        return _bind_ipc(endpoint)
    except socket.gaierror as error:
        raise AddressError(address, f"no such host here: {reason_of(error)}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        if reason == os.strerror(error.errno or 0):
            reason = _REASONS.get(error.errno or 0, reason.lower())
        raise AddressError(address, reason) from None


async def _bind_tcp(endpoint: TcpEndpoint, *, reuse_port: bool) -> Binding:
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
        if reuse_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.setblocking(False)  # noqa: FBT003 - a name of the standard library's
            listening.bind(found[0][4])
        else:
            _listen(listening, found[0][4])
    except BaseException:
        listening.close()
        raise
    host, port = listening.getsockname()[:2]
    return Binding(TcpEndpoint(host, port, is_v6=endpoint.is_v6), listening, None)


def _bind_ipc(endpoint: IpcEndpoint) -> Binding:
    _make_private(endpoint.path.parent)
    lock = _PathLock(endpoint.path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The mode is set before the socket has a path, so other users can never connect.
        os.fchmod(listening.fileno(), 0o600)
        _clear_path(endpoint.path)
        _listen(listening, str(endpoint.path))
    except BaseException:
        listening.close()
        lock.release()
        raise
    return Binding(endpoint, listening, lock)


def _listen(listening: socket.socket, address: str | tuple[Any, ...]) -> None:
    listening.setblocking(False)  # noqa: FBT003 - libzmq's thread must not block on a connection that ended before it was accepted
    listening.bind(address)
    listening.listen(_BACKLOG)


def _make_private(folder: Path) -> None:
    """Create a socket's folder; raises OSError for a folder in which other users could replace the socket.

    In a sticky folder such as /tmp, other users cannot replace the socket; `bind` fails if they bind its path first.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        raise OSError(errno.EPERM, f"a folder that others cannot write to, got mode {stat.S_IMODE(status.st_mode):04o}")
    if status.st_uid not in {0, os.geteuid()}:
        raise OSError(errno.EPERM, f"the folder must belong to this user or root, but user {status.st_uid} owns it")


def _clear_path(path: Path) -> None:
    """Remove a dead process's socket file; raises OSError if the path is in use."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "there is a file that is not a socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise OSError(errno.EADDRINUSE, _TAKEN)  # a process that does not use our locks uses the path


class _PathLock:
    """A lock file next to a socket's path; the kernel releases the lock when the process ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.with_name(path.name + ".lock")
        for _ in range(_LOCK_TRIES):
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                self._make_private()
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
        """Release the path, and remove the socket and lock files unless another process has replaced them."""
        if ours is not None and _is_at(self._path, ours):
            self._path.unlink(missing_ok=True)
        if self._is_current():
            self._file.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _make_private(self) -> None:
        if (owner := os.fstat(self._descriptor).st_uid) != os.geteuid():
            raise OSError(errno.EEXIST, f"{self._file.name} beside it belongs to user {owner}")
        os.fchmod(self._descriptor, 0o600)

    def _is_current(self) -> bool:
        """Return whether the locked file is still at its path; its previous owner may have removed the file."""
        return _is_at(self._file, os.fstat(self._descriptor))


def _is_at(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), status)
    except FileNotFoundError:
        return False
