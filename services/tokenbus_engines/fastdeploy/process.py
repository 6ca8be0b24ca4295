"""What this process has: its options, and the two sides of each queue that it uses."""

import atexit
import concurrent.futures.thread  # noqa: F401 - before `close` is registered: what is registered last is called first
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar

import numpy as np

from tokenbus_engines.fastdeploy.environment import (
    Options,
    is_published,
    queue_id,
    queue_path,
    settings_for,
)
from tokenbus_engines.fastdeploy.message import DRAFT, NOTHING, Message
from tokenbus_engines.fastdeploy.published import Published
from tokenbus_engines.fastdeploy.queue import QueueFullError, QueueReceiver, QueueSender
from tokenbus_services.settings import Settings

T = TypeVar("T")


class Sender:
    """The save side of one queue, for all ranks of this process that save, and what the bus is shown beside it."""

    def __init__(self, path: str, settings: Settings, options: Options) -> None:
        """Begin."""
        self._settings = settings
        self._options = options
        self._saving = threading.Lock()
        self._lost: dict[int, set[int]] = {}
        """By rank, the slots whose tokens were lost since its last message."""
        self._is_published = is_published(settings)
        self.queue = QueueSender(path, settings.worker, settings.bus.reconnect_ms / 1000)
        self.published: dict[int, Published] = {}

    def save(self, message: Message, rank: int) -> None:
        """Put a rank's message into the queue, or raise a QueueFullError: the rank's next message reports the loss."""
        with self._saving:
            if rank in self._lost and message.flag != DRAFT:
                message = message.without(np.isin(np.arange(message.slots), [*self._lost[rank]]))
            try:
                self.queue.send(message.packed(self.queue.next_sequence, time.monotonic_ns()))
            except QueueFullError:
                lost = message.tokens[:, 0] != NOTHING if message.kind.is_single else message.counts != 0
                self._lost.setdefault(rank, set()).update(np.flatnonzero(lost).tolist())
                raise
            if message.flag != DRAFT:
                self._lost.pop(rank, None)
            if self._is_published:
                self.published_of(rank).offer(message)

    def published_of(self, rank: int) -> Published:
        """Return what shows a rank's messages to the bus."""
        if rank not in self.published:
            self.published[rank] = Published(self._settings, self._options, rank)
        return self.published[rank]

    def assign(self, slot: int, key: int, rank: int) -> None:
        """Give a rank's slot the request that the engine named, from its next step on."""
        if self._is_published:
            with self._saving:
                self.published_of(rank).assign(slot, key)

    def close(self) -> None:
        """End; what was saved is handed to the kernel first, as long as the drain's time lasts."""
        self.queue.close(self._settings.worker.drain_timeout_ms / 1000)
        for published in self.published.values():
            published.close()


class Process:
    """Makes what is needed when it is needed first; a process that was forked off begins anew."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._making = threading.RLock()
        self._options = Options()
        self._settings: Settings | None = None
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, QueueReceiver] = {}
        self._is_registered = False
        os.register_at_fork(after_in_child=self._forked)

    @property
    def options(self) -> Options:
        """What was chosen."""
        return self._options

    def configure(self, options: Options) -> None:
        """Choose; what runs already would not follow, so it must not."""
        with self._making:
            if self._senders or self._receivers:
                raise RuntimeError("configure() comes before the first save and get, or after close()")
            self._options, self._settings = options, None

    def sender(self) -> Sender:
        """Return the save side of the queue that the environment names."""
        queue = queue_id()
        return self._senders.get(queue) or self._made(
            self._senders, queue, lambda path, settings: Sender(path, settings, self._options)
        )

    def receiver(self) -> QueueReceiver:
        """Return the get side of the queue that the environment names."""
        queue = queue_id()
        return self._receivers.get(queue) or self._made(self._receivers, queue, lambda path, _: QueueReceiver(path))

    def _made(self, sides: dict[int, T], queue: int, make: Callable[[str, Settings], T]) -> T:
        with self._making:
            if queue not in sides:
                settings = self._begin()
                sides[queue] = make(queue_path(settings, queue), settings)
            return sides[queue]

    def counts(self) -> dict[str, int]:
        """Return what this process has counted so far, over all of its queues and ranks."""
        found: Counter[str] = Counter()
        for sender in self._senders.values():
            items, size = sender.queue.waiting
            found.update(asdict(sender.queue.counts) | {"waiting_items": items, "waiting_bytes": size})
            for published in sender.published.values():
                counts = {f"published_{name}": value for name, value in asdict(published.steps.counts).items()}
                found.update(counts | {"published_waiting_peak": published.peak})
        found.update({"got": sum(receiver.got for receiver in self._receivers.values())})
        return dict(found)

    def close(self) -> None:
        """End what runs."""
        with self._making:
            senders, receivers = list(self._senders.values()), list(self._receivers.values())
            self._senders, self._receivers, self._settings = {}, {}, None
        for sender in senders:
            sender.close()
        for receiver in receivers:
            receiver.close()

    def _begin(self) -> Settings:
        if self._settings is None:
            self._settings = self._options.settings or settings_for()
        if not self._is_registered:
            self._is_registered = True
            # atexit's own functions are called when no thread may be started any more, and publishing may need one.
            getattr(threading, "_register_atexit", atexit.register)(self.close)
        return self._settings

    def _forked(self) -> None:
        """Begin anew: a fork has none of the threads, and must not keep the sockets open when its parent ends."""
        for sender in self._senders.values():
            sender.queue.abandon()
        for receiver in self._receivers.values():
            receiver.abandon()
        self._making = threading.RLock()
        self._settings = None
        self._senders, self._receivers = {}, {}


PROCESS = Process()
