"""Published: saved messages on the bus, for `tokenbus tap`, a gateway or a trainer. The queue never waits for it.

A thread of its own makes steps of messages and publishes them. The order of the calls says which target a draft belongs
to: the last one, where drafts follow their targets, else the next one. A draft without a target is not published.
"""

import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import BatchKind, ContractError, RowStatus, SpeculativeMethod, StepPhase
from tokenbus_engines.fastdeploy.environment import Options
from tokenbus_engines.fastdeploy.message import DRAFT, PREEMPTED, SLOTS, TARGET, UNRECOVERABLE, Lengths, Message
from tokenbus_engines.fastdeploy.slot_step import SlotStep
from tokenbus_engines.fastdeploy.slots import Rows, SlotRegistry
from tokenbus_services.logs import DeduplicatedLog, logger
from tokenbus_services.settings import Settings
from tokenbus_services.worker.assembler import StepAssembler
from tokenbus_services.worker.errors import RetentionFullError
from tokenbus_services.worker.publisher import Publisher
from tokenbus_services.worker.step import StepArrays

_log = logger("worker")
_OPEN = 2
"""How many targets may wait for their drafts: with overlap scheduling the next one comes between."""
_MISSED = 4
"""After so many targets without a draft none is announced."""


@dataclass(slots=True)
class PublishedCounts:
    """What became of messages on their way to a processor."""

    steps: int = 0
    drafts: int = 0
    mended_values: int = 0
    unscored_rows: int = 0
    unpaired_drafts: int = 0
    dropped: int = 0
    """Messages that were not published."""


@dataclass(slots=True, eq=False)
class _Target:
    """A target that was published, and whose draft may come."""

    number: int
    step: SlotStep
    rows: Rows


class Steps:
    """Makes steps of messages, in the order in which they were saved; knows no thread and no processor."""

    def __init__(self, options: Options) -> None:
        """Expect drafts behind their targets, until the calls show another order."""
        self.registry = SlotRegistry()
        self.counts = PublishedCounts()
        self._options = options
        self._number = 0
        self._open: deque[_Target] = deque(maxlen=_OPEN)
        self._held: SlotStep | None = None
        self._missed = 0
        self._repeated_log = DeduplicatedLog()

    def of(self, message: Message) -> list[StepArrays]:
        """Return what a message is on the bus: its batch, and that of a draft that waited for it."""
        if message.flag not in {TARGET, DRAFT}:
            self._drop("a message flag that the bus has no kind for", flag=message.flag)
            return []
        step = SlotStep.of(message)
        self._count_scores(step)
        return self._draft(step) if step.is_draft else self._target(step)

    def _target(self, step: SlotStep) -> list[StepArrays]:
        draft, self._held = self._held, None
        if draft is not None and draft.slots > step.slots:
            draft = None
            self._unpaired()
        rows = self.registry.plan(step)
        self._number += 1
        self._missed += bool(self._open)
        target = _Target(self._number, step, rows)
        is_first = step.proposal_counts is not None
        follows = draft is None and self._expects_draft(step) and not is_first
        arrays = self._arrays(step, rows)
        arrays.draft_follows = follows or draft is not None
        arrays.phase = StepPhase.PREFILL if is_first else StepPhase.MIXED
        self.registry.keep(rows)
        self.counts.steps += 1
        if draft is not None:
            self._missed = _MISSED  # drafts come before their targets here
            self._open.clear()
            return [arrays, self._drafted(target, draft)]
        if follows:
            self._open.append(target)
        return [arrays]

    def _draft(self, step: SlotStep) -> list[StepArrays]:
        target = self._target_of(step)
        if target is None:
            if self._held is not None:
                self._unpaired()
            self._held = step
            return []
        self._missed = 0
        while self._open[0].number < target.number:
            self._open.popleft()  # its draft did not come
        self._open.remove(target)
        return [self._drafted(target, step)]

    def _expects_draft(self, step: SlotStep) -> bool:
        """Return whether a target's draft is to come: a step whose requests all finished has none."""
        has_flag = step.scores is not None and step.decoder_lengths is not None
        is_speculated = self._options.method is not SpeculativeMethod.NONE
        return has_flag and is_speculated and self._missed < _MISSED and step.is_running and step.slots > 0

    def _target_of(self, draft: SlotStep) -> _Target | None:
        """Return the waiting target that a draft belongs to: the one that agrees with it on the slots."""
        fitting = [target for target in self._open if draft.slots <= target.step.slots]
        for target in fitting:
            if _is_alike(target.step, draft):
                return target
        return fitting[-1] if fitting else None

    def _drafted(self, target: _Target, draft: SlotStep) -> StepArrays:
        """Return a draft as its target's: the same requests at the same places."""
        count, counts = draft.slots, draft.counts
        statuses = np.where(counts > 0, np.uint8(RowStatus.ACTIVE), np.uint8(RowStatus.IDLE))
        statuses[counts == PREEMPTED] = RowStatus.PREEMPTED
        statuses[counts == UNRECOVERABLE] = RowStatus.UNRECOVERABLE
        rows = Rows(target.rows.keys[:count], target.rows.positions[:count], statuses, count, target.rows.requests)
        self.counts.drafts += 1
        plain = replace(draft, proposal_counts=None)
        return replace(self._arrays(plain, rows), kind=BatchKind.DRAFT, step=target.number)

    def _arrays(self, step: SlotStep, rows: Rows) -> StepArrays:
        """Return a step's arrays; behind its slots' rows are such as have no tokens."""
        more = rows.keys.size - step.slots
        arrays = StepArrays(
            request_keys=rows.keys,
            positions=rows.positions,
            statuses=rows.statuses,
            token_counts=_padded(step.token_counts, more),
            token_ids=step.token_ids,
            proposal_token_ids=None if step.proposal_counts is None else step.proposal_ids,
            proposal_counts=None if step.proposal_counts is None else _padded(step.proposal_counts, more),
            method=self._options.method if step.decoder_lengths is not None else SpeculativeMethod.NONE,
            phase=StepPhase.MIXED,
            value_kind=self._options.value_kind,
            step=self._number,
        )
        scores = step.scores
        if scores is not None and scores.rows.any():
            arrays.logprobs, arrays.ranks = scores.logprobs, scores.ranks
            arrays.scored = _padded(scores.rows, more)
            if scores.alternative_ids.shape[1]:
                arrays.alternative_token_ids = scores.alternative_ids
                arrays.alternative_logprobs = scores.alternative_logprobs
                arrays.top_ks = _padded(scores.top_ks, more)
        return arrays

    def _count_scores(self, step: SlotStep) -> None:
        scores = step.scores
        if scores is None:
            return
        unscored = int(np.count_nonzero(~scores.rows & (step.counts > 0)))
        self.counts.mended_values += scores.mended
        self.counts.unscored_rows += unscored
        if scores.mended:
            self._repeated_log.begin("scores", _log.info, "scores corrected", values=scores.mended)
        if unscored:
            self._repeated_log.begin("scores", _log.warning, "rows published without scores", rows=unscored)

    def _unpaired(self) -> None:
        self.counts.unpaired_drafts += 1
        self._repeated_log.begin("drafts", _log.info, "draft without a target")

    def _drop(self, why: str, **values: object) -> None:
        self.counts.dropped += 1
        self._repeated_log.begin("dropped", _log.warning, "message not published", reason=why, **values)

    def lose(self, why: str) -> None:
        """Handle messages that were not published: the requests that they may have been about end with an error."""
        self._drop(why)
        self.registry.lose()
        self._open.clear()
        self._held = None


class _Assigned(NamedTuple):
    """A slot's next request as the engine named it, between the messages before and after it."""

    slot: int
    key: int


class Published:
    """Publishes a rank's messages in a thread of its own; as many wait for it as the settings say."""

    def __init__(self, settings: Settings, options: Options, rank: int) -> None:
        """Begin; a processor may come later."""
        worker = settings.worker
        name = f"{worker.id}-rank-{rank}" if rank else worker.id
        # Its stream must never make the engine wait: what finds no room ends its requests there, with an error.
        self.settings = replace(settings, worker=replace(worker, id=name, policy="fail"))
        self._waiting: deque[Message | _Assigned | None] = deque()
        self._arrived = threading.Condition()
        self._most = worker.outbox
        self._overflowed = 0
        self.steps = Steps(options)
        self.peak = 0
        self._thread = threading.Thread(target=self._run, name="tokenbus-fastdeploy-publish", daemon=True)
        self._thread.start()

    def offer(self, message: Message) -> None:
        """Take a message, or leave it out: it waits for nothing."""
        if message.lengths is not None:  # views of the engine's own arrays, which it will overwrite
            decoder, prompt = message.lengths
            message.lengths = Lengths(decoder.astype(np.int64), prompt.astype(np.int64))
        with self._arrived:
            if len(self._waiting) >= self._most:
                self._overflowed += 1
                return
            self._waiting.append(message)
            self.peak = max(self.peak, len(self._waiting))
            self._arrived.notify()

    def assign(self, slot: int, key: int) -> None:
        """Give a slot the request that the engine named, from its next step on."""
        with self._arrived:
            if len(self._waiting) >= self._most + SLOTS:
                self._overflowed += 1
                return
            self._waiting.append(_Assigned(slot, key))
            self._arrived.notify()

    def close(self) -> None:
        """Publish what waits, and end."""
        with self._arrived:
            self._waiting.append(None)
            self._arrived.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            with Publisher(self.settings) as publisher:
                assembler = StepAssembler(self.settings.limits)
                while (message := self._next()) is not None:
                    self._publish(publisher, assembler, message)
        except Exception:  # noqa: BLE001 - it must not end the queue
            _log.exception("publishing failed")
            self._most = 0

    def _next(self) -> Message | _Assigned | None:
        with self._arrived:
            self._arrived.wait_for(lambda: self._waiting)
            overflowed, self._overflowed = self._overflowed, 0
            message = self._waiting.popleft()
        if overflowed:
            self.steps.lose(f"{overflowed} found no room")
        return message

    def _publish(self, publisher: Publisher, assembler: StepAssembler, message: Message | _Assigned) -> None:
        try:
            if isinstance(message, _Assigned):
                self.steps.registry.assign(*message)
                return
            for arrays in self.steps.of(message):
                for batch in assembler.assemble(arrays):
                    publisher.publish(batch, every_rank=True)
        except RetentionFullError as full:
            self.steps.lose("no processor takes them")
            self.steps.registry.forget(full.request_keys)
        except ContractError as error:
            self.steps.lose(str(error))


def _is_alike(target: SlotStep, draft: SlotStep) -> bool:
    """Return whether a target and a draft agree on their slots."""
    count = draft.slots
    for mine, theirs in ((target.counts, draft.counts), (target.decoder_lengths, draft.decoder_lengths)):
        if mine is None or theirs is None or not np.array_equal(mine[:count], theirs):
            return False
    return True


def _padded(counts: npt.NDArray[Any], more: int) -> npt.NDArray[Any]:
    """Return counts, and behind them those of rows that have nothing."""
    return np.append(counts, np.zeros(more, counts.dtype)) if more else counts
