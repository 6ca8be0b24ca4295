"""Assembler: joins the parts of each step, and pairs the step's target batch with its draft batch."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

import numpy as np

from tokenbus.delivery.ack_tracker import PendingAck
from tokenbus.delivery.step import LEAVES, Step
from tokenbus.processor.stream import ItemOutcome
from tokenbus.settings import ProcessorSettings
from tokenbus_contracts import BatchKind, ContractError, LogprobBatch, Rule


@dataclass(slots=True)
class _Parts:
    """The received parts of a step's target batch or draft batch."""

    count: int = 0
    parts: dict[int, LogprobBatch] = field(default_factory=dict)
    rows: int = 0

    @property
    def is_whole(self) -> bool:
        return bool(self.count) and len(self.parts) == self.count

    @property
    def missing_rows(self) -> int:
        return next(iter(self.parts.values())).header.step_rows - self.rows if self.parts else 0

    def joined(self) -> LogprobBatch | None:
        if not self.parts:
            return None
        if len(self.parts) == self.count == 1:
            return self.parts[0]
        return LogprobBatch.joined([self.parts[index] for index in sorted(self.parts)])


@dataclass(slots=True)
class _OpenStep:
    number: int
    opened_at: float
    pending_ack: PendingAck = field(default_factory=PendingAck)
    target: _Parts = field(default_factory=_Parts)
    draft: _Parts = field(default_factory=_Parts)
    wants_draft: bool = False

    @property
    def is_ready(self) -> bool:
        return self.target.is_whole and (not self.wants_draft or self.draft.is_whole)


class Assembler:
    """Assembles the steps of one stream, and releases them in the order of their numbers."""

    def __init__(self, worker_id: str, epoch: int, settings: ProcessorSettings) -> None:
        self._worker_id = worker_id
        self._epoch = epoch
        self._settings = settings
        self._open: dict[int, _OpenStep] = {}
        self._released: OrderedDict[int, _OpenStep] = OrderedDict()
        self._renewed_at = -inf
        self._lost_rows = 0
        self._lost_after = 0
        self.last_released = 0
        self.unpaired: tuple[LogprobBatch, ContractError] | None = None
        """A draft part whose rows do not match the target, and the error that the intake reports for the part."""

    @property
    def open_steps(self) -> int:
        return len(self._open)

    def has_last_row(self, request_id: int) -> bool:
        parts = (part for step in self._open.values() for part in step.target.parts.values())
        return any(LEAVES[part.statuses[part.request_ids == request_id]].any() for part in parts)

    def add(self, batch: LogprobBatch, now: float) -> tuple[ItemOutcome, PendingAck]:
        """Add a batch to its step; return the outcome, and the pending ack of the batch's item.

        Raises ContractError without any change if the batch contradicts the other parts of its step.
        """
        header = batch.header
        step = self._open.get(header.step)
        if step is None:
            if header.step <= self.last_released:
                return self._late(batch), PendingAck(0)
            step = _OpenStep(header.step, now)
        kind = step.target if header.kind is BatchKind.TARGET else step.draft
        earlier = kind.parts.get(header.part_index)
        if earlier is not None:
            return _same(earlier, batch), PendingAck(0)
        _check_part(kind, batch)
        self._open[header.step] = step
        kind.parts[header.part_index] = batch
        kind.count = header.part_count
        kind.rows += batch.row_count
        step.wants_draft |= header.draft_follows or header.kind is BatchKind.DRAFT
        return ItemOutcome.TAKEN, step.pending_ack

    def _late(self, batch: LogprobBatch) -> ItemOutcome:
        """Compare a late batch with the released parts of its step; if the step is forgotten, return DUPLICATE."""
        step = self._released.get(batch.header.step)
        if step is None:
            return ItemOutcome.DUPLICATE
        kind = step.target if batch.header.kind is BatchKind.TARGET else step.draft
        earlier = kind.parts.get(batch.header.part_index)
        if earlier is not None:
            return _same(earlier, batch)
        if batch.header.kind is BatchKind.DRAFT:
            raise ContractError("header.kind", "an announced draft batch that comes in time", "another")
        return ItemOutcome.DUPLICATE

    def ready(self, now: float, *, at_end: bool = False) -> Iterator[Step]:
        """Yield the complete steps in order, and the overdue incomplete steps.

        If `at_end` is set, all steps are yielded, because the stream has ended.
        """
        while self._open:
            step = self._open[min(self._open)]
            if not step.is_ready and not self._is_over(step, now) and not at_end:
                return
            del self._open[step.number]
            yield self._finished(step)

    def count_lost(self, rows: int) -> None:
        """Count rows that were lost at this position of the stream; the caller fails the requests of these rows."""
        newest = max(self._open, default=self.last_released)
        if newest > self._lost_after + 1:  # the counted rows belong to steps that were already released
            self._lost_rows, self._lost_after = 0, newest
        self._lost_rows += rows

    def _is_explained(self, step: _OpenStep) -> bool:
        """Return whether all missing rows of a step are known to be lost, so that only their requests fail."""
        if step.target.is_whole:
            return True
        is_near = self._lost_after <= step.number <= self._lost_after + 1
        return bool(step.target.parts) and is_near and step.target.missing_rows <= self._lost_rows

    def _is_over(self, step: _OpenStep, now: float) -> bool:
        newest = max(self._open)
        if step.target.is_whole and newest > step.number + self._settings.draft_lag_steps:
            return True
        return (
            len(self._open) > self._settings.max_open_steps
            or now - max(step.opened_at, self._renewed_at) >= self._settings.step_timeout_ms / 1000
        )

    def has_open(self, pending_ack: PendingAck) -> bool:
        """Return whether a pending ack belongs to an open step, which only the worker can complete."""
        return any(step.pending_ack is pending_ack for step in self._open.values())

    def renew(self, now: float) -> None:
        """Restart the timeout of the open steps, because parts could not arrive until now."""
        self._renewed_at = now

    def _finished(self, step: _OpenStep) -> Step:
        target = step.target.joined()
        draft = step.draft.joined() if step.draft.is_whole else None
        if target is None:  # the step has a draft batch, but its target batch never arrived
            target = LogprobBatch.joined(list(step.draft.parts.values())).select([])
            draft = None
        if draft is not None:
            error = _unpaired(target, draft)
            if error is not None:
                self.unpaired = step.draft.parts[0], error
                draft = None
        self.last_released = step.number
        self._released[step.number] = step
        if len(self._released) > self._settings.max_open_steps:
            self._released.popitem(last=False)
        return Step(
            self._worker_id,
            self._epoch,
            step.number,
            target,
            draft,
            step.pending_ack,
            step.opened_at,
            step.target.is_whole,
            self._is_explained(step),
        )


def _same(earlier: LogprobBatch, batch: LogprobBatch) -> ItemOutcome:
    theirs = batch.columns
    alike = all(column.tobytes() == theirs[name].tobytes() for name, column in earlier.columns.items())
    return ItemOutcome.DUPLICATE if alike else ItemOutcome.DIVERGENT


def _check_part(kind: _Parts, batch: LogprobBatch) -> None:
    header = batch.header
    if kind.count and header.part_count != kind.count:
        raise ContractError("header.part_count", f"{kind.count}, as in the step's other parts", header.part_count)
    for other in kind.parts.values():
        if other.header.step_rows != header.step_rows:
            limit = f"{other.header.step_rows}, as in the step's other parts"
            raise ContractError("header.step_rows", limit, header.step_rows)
        for column in ("request_ids", "batch_indices"):
            both = np.intersect1d(getattr(other, column), getattr(batch, column))
            if both.size:
                raise ContractError(column, "values that occur in no other part of the step", both[0], rule=Rule.UNIQUE)
    rows = kind.rows + batch.row_count
    is_last = len(kind.parts) + 1 == header.part_count
    if rows > header.step_rows or (is_last and rows != header.step_rows):
        limit = f"{rows}, the rows of the step's parts"
        raise ContractError("header.step_rows", limit, header.step_rows, rule=Rule.LENGTH)


def _unpaired(target: LogprobBatch, draft: LogprobBatch) -> ContractError | None:
    """Return an error if a draft row has no row in the target; rows are paired by request, never by order."""
    order = np.argsort(target.request_ids, kind="stable")
    found = np.searchsorted(target.request_ids, draft.request_ids, sorter=order)
    unknown = np.flatnonzero(found == order.size)
    paired = order[np.minimum(found, order.size - 1)] if order.size else found
    if not unknown.size and order.size:
        unknown = np.flatnonzero(target.request_ids[paired] != draft.request_ids)
    if unknown.size:
        request_id = int(draft.request_ids[unknown[0]])
        return ContractError("request_ids", "requests in the step's target batch", f"{request_id:016x}")
    for column in ("batch_indices", "positions"):
        found, expected = getattr(draft, column), getattr(target, column)[paired]
        rows = np.flatnonzero(found != expected)
        if rows.size:
            row = int(rows[0])
            return ContractError(f"{column}[{row}]", f"{expected[row]}, as in the step's target", found[row])
    return None
