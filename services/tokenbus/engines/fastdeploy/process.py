"""The state of this process: its options, and both sides of its queues."""

import atexit
import concurrent.futures.thread  # noqa: F401 - before `close` is registered: what is registered last is called first
import os
import threading
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np

from tokenbus.engines.fastdeploy.environment import Options, is_published, queue_id, queue_path, settings_for
from tokenbus.engines.fastdeploy.forms import Form, chosen
from tokenbus.engines.fastdeploy.message import DRAFT, NOTHING, SLOTS, Kind, unpacked
from tokenbus.engines.fastdeploy.published import Published
from tokenbus.engines.fastdeploy.queue import QueueFullError, QueueReceiver, QueueSender
from tokenbus.engines.fastdeploy.signatures import Signature
from tokenbus.settings import Settings


class Sender:
    """Save side of one queue id for all ranks of this process, with a publisher per rank."""

    def __init__(self, path: str, settings: Settings, options: Options) -> None:
        """Create the save side of the two queues whose paths begin with `path`."""
        self._path, self._settings, self._options = path, settings, options
        self._saving = threading.Lock()
        self._lost: dict[int, bytes] = {}
        """For each rank, one byte per slot: 1 if tokens of the slot were lost since the rank's last message."""
        self._is_published = is_published(settings)
        self.queues: dict[str, QueueSender] = {}
        self.published: dict[int, Published] = {}

    def save(self, signature: Signature, given: tuple[Any, ...], rank: int) -> None:
        """Queue a step's message. After a QueueFullError, the rank's next message marks the lost slots."""
        with self._saving:
            lost = self._lost.get(rank)
            try:
                data = self._queue(signature.kind).send(
                    lambda socket, sequence: signature.pack(given, socket, sequence, lost)
                )
            except QueueFullError as full:
                full.args = (f"{signature.op}: {full}",)
                self._lost[rank] = _with_lost(lost or bytes(SLOTS), full.lost)
                raise
            if lost is not None and unpacked(data).flag != DRAFT:
                del self._lost[rank]
            if self._is_published:
                message = unpacked(data)
                message.lengths = signature.lengths(given, message.slots)
                message.is_first = signature.is_first
                self.published_of(rank).offer(message)

    def _queue(self, kind: Kind) -> QueueSender:
        path = path_of(self._path, kind)
        if path not in self.queues:
            self.queues[path] = QueueSender(path, self._settings.worker, self._settings.bus.reconnect_ms / 1000)
        return self.queues[path]

    def published_of(self, rank: int) -> Published:
        if rank not in self.published:
            self.published[rank] = Published(self._settings, self._options, rank)
        return self.published[rank]

    def assign(self, slot: int, request_id: int, rank: int) -> None:
        if self._is_published:
            with self._saving:
                self.published_of(rank).assign(slot, request_id)

    def close(self) -> None:
        """Wait until the kernel has all saved messages, at most for the drain timeout, and close."""
        for queue in self.queues.values():
            queue.close(self._settings.worker.drain_timeout_ms / 1000)
        for published in self.published.values():
            published.close()


class Process:
    """Creates senders and receivers at their first use. A forked process starts from scratch."""

    def __init__(self) -> None:
        self.options = Options()
        self.is_xpu = False
        """Whether the ops replace XPU ops. In every release, all save ops for XPU respect `save_each_rank`."""
        self._form: Form | None = None
        self._is_registered = False
        self._begin_anew()
        os.register_at_fork(after_in_child=self._forked)

    def _begin_anew(self) -> None:
        self._making = threading.RLock()
        self._settings: Settings | None = None
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[tuple[int, bool], QueueReceiver] = {}

    def configure(self, options: Options) -> None:
        with self._making:
            if self._senders or self._receivers:
                raise RuntimeError("call configure() before the first save or get, or after close()")
            self.options, self._settings, self._form = options, None, None

    @property
    def form(self) -> Form:
        """Form of the ops, which is chosen and logged at the first use."""
        if self._form is None:
            with self._making:
                if self._form is None:
                    self._form = chosen(self.options.form)
        return self._form

    def sender(self) -> Sender:
        """Return the save side of the queue that the environment names."""
        queue = queue_id()
        found = self._senders.get(queue)
        if found is None:
            with self._making:
                if queue not in self._senders:
                    settings = self._begin()
                    self._senders[queue] = Sender(queue_path(settings, queue), settings, self.options)
                found = self._senders[queue]
        return found

    def receiver(self, kind: Kind) -> QueueReceiver:
        """Return the get side for a kind of message, with the queue id of the environment."""
        queue = queue_id(), kind is Kind.SPECULATED
        found = self._receivers.get(queue)
        if found is None:
            with self._making:
                if queue not in self._receivers:
                    self._receivers[queue] = QueueReceiver(path_of(queue_path(self._begin(), queue[0]), kind))
                found = self._receivers[queue]
        return found

    def counts(self) -> dict[str, int]:
        found: Counter[str] = Counter(got=sum(receiver.got for receiver in self._receivers.values()))
        for sender in self._senders.values():
            for queue in sender.queues.values():
                items, size = queue.waiting
                found.update(asdict(queue.counts) | {"waiting_items": items, "waiting_bytes": size})
            for published in sender.published.values():
                found.update({f"published_{name}": value for name, value in asdict(published.steps.counts).items()})
        return dict(found)

    def close(self) -> None:
        with self._making:
            senders, receivers = list(self._senders.values()), list(self._receivers.values())
            self._senders, self._receivers, self._settings, self._form = {}, {}, None, None
            for receiver in receivers:  # under the lock, because another thread may create new receivers
                receiver.close()
        for sender in senders:
            sender.close()

    def _begin(self) -> Settings:
        if self._settings is None:
            self._settings = self.options.settings or settings_for()
        if not self._is_registered:
            self._is_registered = True
            # Functions of atexit run too late for publishing, which may need to start a thread.
            getattr(threading, "_register_atexit", atexit.register)(self.close)
        return self._settings

    def _forked(self) -> None:
        """Start from scratch, because a forked process has no threads and must not keep its parent's sockets open."""
        for sender in self._senders.values():
            for queue in sender.queues.values():
                queue.abandon()
        for receiver in self._receivers.values():
            receiver.abandon()
        self._begin_anew()


def path_of(path: str, kind: Kind) -> str:
    """Return a kind's queue path. FastDeploy has two queues for each id, with keys from "./" and "/dev/shm"."""
    return f"{path}-speculated" if kind is Kind.SPECULATED else path


def _with_lost(slots: bytes, data: bytes) -> bytes:
    """Return `slots` with a mark for each slot that has tokens in a lost message."""
    message, found = unpacked(data), np.frombuffer(slots, np.uint8).copy()
    has_tokens = message.tokens[:, 0] != NOTHING if message.kind.is_single else message.counts != 0
    found[: message.slots] |= has_tokens
    return found.tobytes()


PROCESS = Process()
