"""Published: publishes saved messages on the bus. FastDeploy's queue never waits for the bus.

A separate thread converts messages to steps and passes the steps to a publisher. If the engine saves drafts after their
targets, a draft belongs to an earlier target, and otherwise to the next target. An unpaired draft is not published.
"""

import threading
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from tokenbus.engines.fastdeploy.environment import Options
from tokenbus.engines.fastdeploy.message import DRAFT, SLOTS, TARGET, Message
from tokenbus.engines.fastdeploy.slots import SlotRegistry
from tokenbus.engines.fastdeploy.step_arrays import arrays_of
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.settings import Settings
from tokenbus.worker.publishing import PublisherClient, publisher_client
from tokenbus.worker.step import StepArrays
from tokenbus_contracts import BatchKind, ContractError, SpeculativeMethod

_log = logger("worker")
_OPEN = 2
"""Maximum number of targets that wait for drafts. With overlap scheduling, a draft comes after the next target."""
_MISSED = 4
"""After this number of targets without drafts, targets no longer announce drafts."""


@dataclass(slots=True)
class PublishedCounts:
    """Counts of messages on their way to a processor, by outcome."""

    steps: int = 0
    drafts: int = 0
    mended_values: int = 0
    unscored_rows: int = 0
    unpaired_drafts: int = 0
    dropped: int = 0
    ended_requests: int = 0
    """Number of requests that the bus ended because some of their rows could not be published."""


class _Step(NamedTuple):
    message: Message
    arrays: StepArrays


class Steps:
    """Converts messages to steps in the order of saving, without threads or connections."""

    def __init__(self, options: Options) -> None:
        """Create a converter that expects drafts after their targets, until a draft arrives before its target."""
        self.registry = SlotRegistry()
        self.counts = PublishedCounts()
        self._options = options
        self._number = 0
        self._open: deque[_Step] = deque(maxlen=_OPEN)
        self._held: _Step | None = None
        self._missed = 0
        self._repeated_log = DeduplicatedLog()

    def of(self, message: Message) -> list[StepArrays]:
        """Return a message's batch, and the draft batch that waited for this message, if there is one."""
        if message.flag not in {TARGET, DRAFT}:
            self._drop("a message flag for which the bus has no kind", flag=message.flag)
            return []
        arrays, mended = arrays_of(message, self._options)
        self._count_scores(arrays, mended)
        step = _Step(message, arrays)
        return self._draft(step) if arrays.kind is BatchKind.DRAFT else self._target(step)

    def _target(self, step: _Step) -> list[StepArrays]:
        message, arrays = step
        draft, self._held = self._held, None
        if draft is not None and draft.message.slots > message.slots:
            draft = None
            self._unpaired()
        self.registry.fill(arrays, message)
        self._number += 1
        arrays.step = self._number
        self._missed += bool(self._open)
        follows = draft is None and self._expects_draft(message)
        arrays.draft_follows = follows or draft is not None
        self.counts.steps += 1
        if draft is not None:
            self._missed = _MISSED  # drafts come before their targets here
            self._open.clear()
            return [arrays, self._drafted(step, draft)]
        if follows:
            self._open.append(step)
        return [arrays]

    def _draft(self, step: _Step) -> list[StepArrays]:
        target = self._target_of(step.message)
        if target is None:
            if self._held is not None:
                self._unpaired()
            self._held = step
            return []
        self._missed = 0
        while self._open.popleft() is not target:
            pass  # this target's draft did not arrive
        if not target.arrays.draft_follows:
            self._drop("its target was not published")
            return []
        return [self._drafted(target, step)]

    def _expects_draft(self, message: Message) -> bool:
        """Return whether a target's draft is expected. A step in which all requests finish has no draft."""
        has_flag = message.kind.is_scored and message.lengths is not None and not message.is_first
        is_speculated = self._options.method is not SpeculativeMethod.NONE
        return has_flag and is_speculated and self._missed < _MISSED and message.stop_flag > 0 and message.slots > 0

    def _target_of(self, draft: Message) -> _Step | None:
        """Return the target whose counts and lengths equal the draft's, or else the newest target with enough slots."""
        fitting = [target for target in self._open if draft.slots <= target.message.slots]
        for target in fitting:
            if _is_alike(target.message, draft):
                return target
        return fitting[-1] if fitting else None

    def _drafted(self, target: _Step, draft: _Step) -> StepArrays:
        """Return the draft's arrays with the request ids, positions and step of its target."""
        arrays, count = draft.arrays, draft.message.slots
        arrays.request_ids, arrays.positions = target.arrays.request_ids[:count], target.arrays.positions[:count]
        arrays.step = target.arrays.step
        self.counts.drafts += 1
        return arrays

    def _count_scores(self, arrays: StepArrays, mended: int) -> None:
        unscored = 0 if arrays.scored is None else int(np.count_nonzero(~arrays.scored & (arrays.token_counts > 0)))
        self.counts.mended_values += mended
        self.counts.unscored_rows += unscored
        if mended:
            self._repeated_log.begin("scores", _log.info, "scores corrected", values=mended)
        if unscored:
            self._repeated_log.begin("scores", _log.warning, "rows published without scores", rows=unscored)

    def _unpaired(self) -> None:
        self.counts.unpaired_drafts += 1
        self._repeated_log.begin("drafts", _log.info, "draft without a target")

    def _drop(self, why: str, **values: object) -> None:
        self.counts.dropped += 1
        self._repeated_log.begin("dropped", _log.warning, "message not published", reason=why, **values)

    def lose(self, why: str) -> None:
        """End all open requests with an error, because messages were not published."""
        self._drop(why)
        self.registry.lose()
        self._open.clear()
        self._held = None

    def end(self, request_ids: list[int]) -> None:
        """Forget requests that the bus has ended because some of their rows were not published."""
        count = len(request_ids)
        self.counts.ended_requests += count
        self._repeated_log.begin("ended", _log.warning, "requests ended: rows not published", requests_ended=count)
        self.registry.lose(request_ids)
        lost = np.array(request_ids, np.uint64)
        for target in self._open:
            if np.isin(target.arrays.request_ids, lost).all():
                target.arrays.draft_follows = False  # without its target, a draft is not published


_Assigned = tuple[int, int]
"""A slot and the request id that the engine assigned to the slot, queued in order with the messages."""


class Published:
    """Publishes a rank's messages from a separate thread, with a queue of at most `worker.outbox` messages."""

    def __init__(self, settings: Settings, options: Options, rank: int) -> None:
        """Start publishing. The processor may start later."""
        # Publishing must never block the engine, so requests end with an error if retention is full.
        # Each saving rank has its own stream.
        worker = replace(settings.worker, policy="fail")
        if rank:
            worker = replace(worker, id=f"{worker.id}-rank-{rank}", metrics_address="")
        self.settings = replace(settings, worker=worker)
        self._waiting: SimpleQueue[Message | _Assigned | None] = SimpleQueue()
        self._most = worker.outbox
        self._overflowed = 0
        """Number of messages that the saving threads dropped because the queue was full."""
        self.steps = Steps(options)
        self._thread = threading.Thread(target=self._run, name="tokenbus-fastdeploy-publish", daemon=True)
        self._thread.start()

    def offer(self, message: Message) -> None:
        """Queue a message without blocking, or drop the message if the queue is full."""
        self._put(message, self._most)

    def assign(self, slot: int, request_id: int) -> None:
        self._put((slot, request_id), self._most + SLOTS)

    def _put(self, item: Message | _Assigned, most: int) -> None:
        if self._waiting.qsize() >= most:
            self._overflowed += 1
        else:
            self._waiting.put(item)

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        reported = 0
        try:
            with ExitStack() as stack:
                client = publisher_client(stack, self.settings, in_background=True)
                while (item := self._waiting.get()) is not None:
                    overflowed = self._overflowed
                    if overflowed > reported:
                        self.steps.lose(f"{overflowed - reported} found no room")
                        reported = overflowed
                    if ended := client.take_aborts():
                        self.steps.end(ended)
                    self._publish(client, item)
        except Exception:  # noqa: BLE001 - it must not end the queue
            _log.exception("publishing failed")
            self._most = 0

    def _publish(self, client: PublisherClient, item: Message | _Assigned) -> None:
        try:
            if isinstance(item, tuple):
                self.steps.registry.assign(*item)
                return
            for arrays in self.steps.of(item):
                client.emit(arrays)
        except ContractError as error:
            self.steps.lose(str(error))


def _is_alike(target: Message, draft: Message) -> bool:
    if target.lengths is None or draft.lengths is None:
        return False
    has_counts = np.array_equal(target.counts[: draft.slots], draft.counts)
    return has_counts and np.array_equal(target.lengths.decoder[: draft.slots], draft.lengths.decoder)
