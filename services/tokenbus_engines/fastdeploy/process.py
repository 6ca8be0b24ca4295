"""What this process has: its options, and the two sides of each queue that it uses."""

import atexit
import concurrent.futures.thread  # noqa: F401 - before `close` is registered: what is registered last is called first
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Protocol, TypeVar

import numpy as np

from tokenbus_engines.fastdeploy import native
from tokenbus_engines.fastdeploy.environment import (
    QUEUE,
    Options,
    is_published,
    queue_id,
    queue_path,
    settings_for,
)
from tokenbus_engines.fastdeploy.forms import Form, chosen
from tokenbus_engines.fastdeploy.message import DRAFT, NOTHING, Kind, Message, unpacked
from tokenbus_engines.fastdeploy.published import Published, SavedMessage
from tokenbus_engines.fastdeploy.queue import Pack, QueueFullError, QueueReceiver, QueueSender
from tokenbus_services.settings import Settings

K = TypeVar("K")
T = TypeVar("T")
_QUEUE = QUEUE.encode()


class Step(Protocol):
    """One call of a save op: its arguments, and how to pack them."""

    op: str
    kind: Kind
    rank: int

    def pack(self, socket: int, sequence: int, /) -> tuple[bytes, int]:
        """Return the message, and how many of its bytes the socket took: see `QueueSender.send`."""

    def saved(self, data: bytes) -> SavedMessage:
        """Return the message with the slots' lengths, which only the bus needs."""


class Sender:
    """The save side of one queue id, for all ranks of this process, and the publishers that show them to the bus."""

    def __init__(self, path: str, settings: Settings, options: Options) -> None:
        """Save to the two queues of an id, whose paths begin with `path`."""
        self._path = path
        self._settings = settings
        self._options = options
        self._saving = threading.Lock()
        self._lost: dict[int, set[int]] = {}
        """By rank, the slots whose tokens were lost since its last message."""
        self._is_published = is_published(settings)
        self.queues: dict[str, QueueSender] = {}
        self._queues: dict[Kind, QueueSender] = {}
        self.published: dict[int, Published] = {}

    def save(self, step: Step) -> None:
        """Put a step's message into the queue; after a QueueFullError the rank's next one says so."""
        rank = step.rank
        with self._saving:
            pack = self._with_losses(step, self._lost[rank]) if rank in self._lost else step.pack
            try:
                data = (self._queues.get(step.kind) or self._queue(step.kind)).send(pack)
            except QueueFullError as full:
                full.args = (f"{step.op}: {full}",)
                self._lost.setdefault(rank, set()).update(_slots_with_tokens(unpacked(full.lost)))
                raise
            if rank in self._lost and unpacked(data).flag != DRAFT:
                del self._lost[rank]
            if self._is_published:
                self.published_of(rank).offer(step.saved(data))

    def _with_losses(self, step: Step, lost: set[int]) -> Pack:
        """Return a `pack` that marks the slots whose tokens were lost as unrecoverable; drafts stay as they are."""

        def pack(_: int, sequence: int) -> tuple[bytes, int]:
            data, sent = step.pack(-1, sequence)
            message = unpacked(data)
            if message.flag != DRAFT:
                marked = message.without(np.isin(np.arange(message.slots), [*lost]))
                data = marked.packed(sequence, time.monotonic_ns())
            return data, sent

        return pack

    def _queue(self, kind: Kind) -> QueueSender:
        path = path_of(self._path, kind)
        if path not in self.queues:
            self.queues[path] = QueueSender(path, self._settings.worker, self._settings.bus.reconnect_ms / 1000)
        self._queues[kind] = self.queues[path]
        return self.queues[path]

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
        for queue in self.queues.values():
            queue.close(self._settings.worker.drain_timeout_ms / 1000)
        for published in self.published.values():
            published.close()


class Process:
    """Makes what is needed when it is needed first; a process that was forked off begins anew."""

    def __init__(self) -> None:
        self._making = threading.RLock()
        self._options = Options()
        self._settings: Settings | None = None
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[tuple[int, bool], QueueReceiver] = {}
        self._form: Form | None = None
        self.is_xpu = False
        """Whether the ops are in the place of those for XPU, whose saves all heed `save_each_rank`, in each release."""
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
            self._options, self._settings, self._form = options, None, None

    @property
    def form(self) -> Form:
        """The form that the ops speak; the first use chooses and logs it."""
        if self._form is None:
            with self._making:
                if self._form is None:
                    self._form = chosen(self._options.form)
        return self._form

    def sender(self) -> Sender:
        """Return the save side of the queue that the environment names."""
        queue = native.number()(_QUEUE, 1)
        return self._senders.get(queue) or self._made(
            self._senders, queue, lambda path, settings: Sender(path, settings, self._options)
        )

    def receiver(self, kind: Kind) -> QueueReceiver:
        """Return the get side for a kind, of the queue id in the environment."""
        queue = native.number()(_QUEUE, 1), kind is Kind.SPECULATED
        return self._receivers.get(queue) or self._made(
            self._receivers, queue, lambda path, _: QueueReceiver(path_of(path, kind))
        )

    def _made(self, sides: dict[K, T], key: K, make: Callable[[str, Settings], T]) -> T:
        number = queue_id()  # raises SettingsError if it is none
        with self._making:
            if key not in sides:
                settings = self._begin()
                sides[key] = make(queue_path(settings, number), settings)
            return sides[key]

    def counts(self) -> dict[str, int]:
        """Return what this process has counted so far, over all of its queues and ranks."""
        found: Counter[str] = Counter()
        for sender in self._senders.values():
            for queue in sender.queues.values():
                items, size = queue.waiting
                found.update(asdict(queue.counts) | {"waiting_items": items, "waiting_bytes": size})
            for published in sender.published.values():
                counts = {f"published_{name}": value for name, value in asdict(published.steps.counts).items()}
                found.update(counts | {"published_waiting_peak": published.peak})
        found.update({"got": sum(receiver.got for receiver in self._receivers.values())})
        return dict(found)

    def close(self) -> None:
        """End what runs."""
        with self._making:
            senders, receivers = list(self._senders.values()), list(self._receivers.values())
            self._senders, self._receivers, self._settings, self._form = {}, {}, None, None
            for receiver in receivers:  # before a get of another thread makes new ones
                receiver.close()
        for sender in senders:
            sender.close()

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
            for queue in sender.queues.values():
                queue.abandon()
        for receiver in self._receivers.values():
            receiver.abandon()
        self._making = threading.RLock()
        self._settings = None
        self._senders, self._receivers = {}, {}


def path_of(path: str, kind: Kind) -> str:
    """Return the path of the queue for a kind: FastDeploy has two for an id, with keys from "./" and "/dev/shm"."""
    return f"{path}-speculated" if kind is Kind.SPECULATED else path


def _slots_with_tokens(message: Message) -> list[int]:
    lost = message.tokens[:, 0] != NOTHING if message.kind.is_single else message.counts != 0
    found: list[int] = np.flatnonzero(lost).tolist()
    return found


PROCESS = Process()
