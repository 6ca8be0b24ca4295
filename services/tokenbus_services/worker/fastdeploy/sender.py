"""Sender: the save side. One publisher, and what is known of the slots it publishes for."""

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from tokenbus_contracts import BatchKind, LogprobBatch, RowStatus, SpeculativeMethod, StepPhase, encode
from tokenbus_services.settings import Settings
from tokenbus_services.worker.assembler import StepAssembler
from tokenbus_services.worker.errors import RetentionFullError
from tokenbus_services.worker.fastdeploy.background import Background, Run
from tokenbus_services.worker.fastdeploy.drafts import Target, Targets
from tokenbus_services.worker.fastdeploy.layout import PREEMPTED, UNRECOVERABLE, MessageFlag
from tokenbus_services.worker.fastdeploy.message import NO_IDS, Integers, Message
from tokenbus_services.worker.fastdeploy.options import Options
from tokenbus_services.worker.fastdeploy.slots import Rows, SlotBook
from tokenbus_services.worker.publisher import Publisher
from tokenbus_services.worker.step import StepArrays

BESIDE = StepPhase.DECODE
"""The phase of a step that only carries a draft, whose target had been published without waiting for one."""


class Sender:
    """Publishes messages as steps. Its rows are slots: where a row stands in the batch is which slot it is."""

    def __init__(self, settings: Settings, options: Options) -> None:
        """Start a publisher in a thread of its own."""
        self._options = options
        self._assembler = StepAssembler(settings.limits)
        self._book = SlotBook()
        self._targets = Targets()
        self._step = 0
        self._saving = threading.Lock()
        self._background: Background[Publisher] = Background("tokenbus-fastdeploy-save", _publishing(settings))

    @property
    def publisher(self) -> Publisher:
        """What it publishes with."""
        return self._background.service

    def close(self) -> None:
        """Wait until all is acknowledged, or the drain's time is over, and leave."""
        self._background.close()

    def assign(self, slot: int, key: int) -> None:
        """Learn which request a slot has from now on."""
        with self._saving:
            self._book.assign(slot, key)

    def save(self, message: Message, method: SpeculativeMethod) -> None:
        """Publish a message, or raise what is wrong: then nothing of it was published."""
        with self._saving:
            try:
                if message.flag is MessageFlag.TARGET:
                    self._save_target(message, method)
                else:
                    self._save_draft(message, method)
            except RetentionFullError as full:
                self._book.end(full.request_keys, message)  # as the gap does that it leaves in the stream
                self._targets = Targets()
                raise

    def _save_target(self, message: Message, method: SpeculativeMethod) -> None:
        message = self._book.told_of_losses(message)
        rows = self._book.plan(message)
        is_announced = method is not SpeculativeMethod.NONE and self._targets.expects_draft(message)
        is_first = message.proposal_counts is not None
        arrays = replace(
            self._arrays(message, rows, method),
            step=self._step + 1,
            draft_follows=is_announced and not is_first,
            phase=StepPhase.PREFILL if is_first else StepPhase.MIXED,
        )
        self._publish(self._assembled(arrays))
        self._step += 1
        self._book.keep(rows)
        if not is_first:
            self._targets.add(Target(self._step, message, rows, is_announced))

    def _save_draft(self, message: Message, method: SpeculativeMethod) -> None:
        target = self._targets.find(message)
        # Where nobody waited for it, its step is over: it goes in one of its own, beside rows without tokens.
        beside = None if target.is_announced else self._book.plan_beside(message.slots)
        rows = target.rows if beside is None else beside
        step = target.step if beside is None else self._step + 1
        drafted = replace(self._arrays(message, _of_draft(rows, message), method), kind=BatchKind.DRAFT, step=step)
        batches = self._assembled(drafted, is_checked=beside is not None)
        if beside is not None:
            carrier = self._arrays(_nothing(message.slots), beside, method)
            self._publish(self._assembled(replace(carrier, step=step, draft_follows=True, phase=BESIDE)))
            self._step = step
            self._book.keep(beside)
        self._publish(batches)
        self._targets.take(target)

    def _arrays(self, message: Message, rows: Rows, method: SpeculativeMethod) -> StepArrays:
        """Return a message's arrays; behind its slots' rows are such as have no tokens."""
        more = rows.keys.size - message.slots
        scores = message.scores if rows.keys.size else None
        wide = scores is not None and scores.columns > 1
        return StepArrays(
            request_keys=rows.keys,
            positions=rows.positions,
            statuses=rows.statuses,
            token_counts=_padded(message.token_counts, more),
            token_ids=message.token_ids,
            logprobs=None if scores is None else scores.logprobs,
            ranks=None if scores is None else scores.ranks,
            alternative_token_ids=scores.alternative_ids if scores is not None and wide else None,
            alternative_logprobs=scores.alternative_logprobs if scores is not None and wide else None,
            proposal_token_ids=None if message.proposal_counts is None else message.proposal_ids,
            proposal_counts=None if message.proposal_counts is None else _padded(message.proposal_counts, more),
            method=method,
            phase=StepPhase.MIXED,
            value_kind=self._options.value_kind,
        )

    def _assembled(self, arrays: StepArrays, *, is_checked: bool = False) -> list[LogprobBatch]:
        """Return batches of which each keeps the contract, where one could be published before another is refused."""
        batches = self._assembler.assemble(arrays)
        if len(batches) > 1 or is_checked:
            for batch in batches:
                named = batch.header._replace(worker_id=self.publisher.worker_id)
                encode(LogprobBatch.of_views(named, batch.columns), self.publisher.settings.limits)
        return batches

    def _publish(self, batches: list[LogprobBatch]) -> None:
        for batch in batches:
            self.publisher.publish(batch, every_rank=True)


def _publishing(settings: Settings) -> Run[Publisher]:
    async def _run(started: "Future[Publisher]", stopping: asyncio.Event) -> None:
        async with Publisher(settings) as publisher:
            started.set_result(publisher)
            await stopping.wait()

    return _run


def _padded(counts: Integers, more: int) -> Integers:
    """Return counts, and behind them those of rows that have nothing."""
    return np.append(counts, np.zeros(more, np.int64)) if more else counts


def _nothing(slots: int) -> Message:
    """Return a message in which no slot has a token."""
    return Message(flag=MessageFlag.TARGET, is_running=True, counts=np.zeros(slots, np.int64), token_ids=NO_IDS)


def _of_draft(rows: Rows, message: Message) -> Rows:
    """Return the rows of a draft: the same requests at the same places, with what is said of them there."""
    count = message.slots
    statuses = np.where(message.counts > 0, np.uint8(RowStatus.ACTIVE), np.uint8(RowStatus.IDLE))
    if message.prefilling is not None:
        statuses[message.prefilling & (message.counts == 0)] = RowStatus.PREFILLING
    if not message.is_running:
        statuses[:] = RowStatus.FINISHED_STOP
    statuses[message.counts == PREEMPTED] = RowStatus.PREEMPTED
    statuses[message.counts == UNRECOVERABLE] = RowStatus.UNRECOVERABLE
    return Rows(rows.keys[:count], rows.positions[:count], statuses, count, rows.lives)
