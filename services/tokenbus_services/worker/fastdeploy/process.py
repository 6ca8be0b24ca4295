"""What this process has: its options, a sender for each rank that saves, and a receiver."""

import atexit
import concurrent.futures.thread  # noqa: F401 - before `close` is registered: what is registered last is called first
import os
import threading

from tokenbus_services.worker.fastdeploy.environment import settings_for
from tokenbus_services.worker.fastdeploy.options import Options
from tokenbus_services.worker.fastdeploy.receiver import Receiver
from tokenbus_services.worker.fastdeploy.sender import Sender


class Process:
    """Makes what is needed when it is needed first; a process that was forked off begins anew."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._making = threading.RLock()
        self._options = Options()
        self._begin()

    def _begin(self) -> None:
        self._pid = 0
        self._senders: dict[int, Sender] = {}
        self._receiver: Receiver | None = None

    @property
    def options(self) -> Options:
        """What was chosen."""
        return self._options

    def configure(self, options: Options) -> None:
        """Choose; what runs already would not follow, so it must not."""
        with self._making:
            if self._pid == os.getpid() and (self._senders or self._receiver is not None):
                raise RuntimeError("configure() comes before the first save and get, or after close()")
            self._options = options

    def sender(self, rank: int) -> Sender:
        """Return what publishes for a rank."""
        with self._making:
            self._enter()
            if rank not in self._senders:
                self._senders[rank] = Sender(self._options.settings or settings_for(rank), self._options)
            return self._senders[rank]

    def receiver(self) -> Receiver:
        """Return what takes steps."""
        with self._making:
            self._enter()
            if self._receiver is None:
                self._receiver = Receiver(self._options.settings or settings_for(0))
            return self._receiver

    def close(self) -> None:
        """End what runs: what was saved is sent first, as long as the drain's time lasts."""
        with self._making:
            if self._pid != os.getpid():
                return
            senders, receiver = list(self._senders.values()), self._receiver
            self._senders, self._receiver = {}, None
        for sender in senders:
            sender.close()
        if receiver is not None:
            receiver.close()

    def _enter(self) -> None:
        if self._pid == os.getpid():
            return
        is_first = not self._pid
        self._begin()  # a fork has neither the threads nor the sockets
        self._pid = os.getpid()
        if is_first:
            # atexit's own functions are called when no thread may be started any more, and sockets are closed by one.
            getattr(threading, "_register_atexit", atexit.register)(self.close)


PROCESS = Process()
