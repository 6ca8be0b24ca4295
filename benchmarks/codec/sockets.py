"""A ZeroMQ socket pair within this process, over ipc."""

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

_HIGH_WATER_MARK = 16
_DEADLINE_MS = 10_000


class Pipe:
    """PUSH to PULL over ipc, messages copied on both sides; a lost message is an error, not a wait."""

    def __enter__(self) -> Self:
        """Open the sockets; the I/O thread runs on the cores that this thread is pinned to."""
        self._folder = tempfile.TemporaryDirectory(prefix="tokenbus-bench-")
        self._context = zmq.Context()
        self._pull, self._push = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for socket in (self._pull, self._push):
            socket.set_hwm(_HIGH_WATER_MARK)
            socket.linger = 0
            socket.rcvtimeo = socket.sndtimeo = _DEADLINE_MS
        address = f"ipc://{Path(self._folder.name) / 'pipe'}"
        self._pull.bind(address)
        self._push.connect(address)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the sockets."""
        self._push.close()
        self._pull.close()
        self._context.term()
        self._folder.cleanup()

    def through(self, message: bytes) -> bytes:
        """Send a message and return it as it was received."""
        self._push.send(message)
        return self._pull.recv()
