"""From steps to requests: each row settled against what its request has had, then handed to its consumer."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tokenbus.delivery import Step
from tokenbus.delivery.slots import Slots
from tokenbus.delivery.step import LEAVES
from tokenbus.processor.requests import NO_STREAM, UNCLAIMED, Request, RequestTable, Source, State
from tokenbus.processor.session import Session
from tokenbus.processor.step_parts import Part, Rows, StepParts, dealt
from tokenbus_contracts import LogprobBatch, RowStatus
from tokenbus_contracts.generated.request_pb2 import ErrorCode

if TYPE_CHECKING:
    from tokenbus.processor.request_registry import RequestRegistry

_MOST_TURNED_AWAY = 16
"""How many requests of one step a worker is asked to end: to say so costs more than to read the step."""


@dataclass(slots=True)
class RowCounts:
    """What became of rows, in rows."""

    delivered: int = 0
    repeated: int = 0
    late: int = 0
    unknown: int = 0
    foreign: int = 0


class Router:
    """Compares each row of a step with what its request has had, and hands what is new to the request's consumer."""

    def __init__(self, table: RequestTable, registry: "RequestRegistry") -> None:
        self._table = table
        self._registry = registry
        self.consumers: dict[int, Session] = {}
        """By route, the session that takes the rows of its requests."""
        self.counts = RowCounts()

    def route(self, step: Step, source: Source, now: float) -> None:
        """Hand each row that is new to its request to its consumer; the step keeps those rows alone."""
        slots = self._table.slots_of(step.rows.request_ids)
        parts: Iterable[Part] | None = None
        if step.draft_rows is None:
            parts = dealt(step.rows, slots, self._table.running, source.stream, UNCLAIMED + 1)
        if parts is None:
            slots = self._settle(step, slots, source, now)
            self._table.advance(slots, step.rows.token_counts)
            parts = StepParts(step.rows, self._table.route[slots]) if slots.size else ()
        if slots.size:
            self._deliver(step, source, slots, parts)

    def _deliver(self, step: Step, source: Source, slots: Slots, parts: Iterable[Part]) -> None:
        table, target = self._table, step.rows
        self.counts.delivered += slots.size
        for part in parts:
            if part.route == UNCLAIMED:
                table.put_aside(step, slots, part.rows)
            elif (consumer := self.consumers.get(part.route)) is not None:  # else only steps() shows it, or it ended
                consumer.give(step, slots, part)
        leaving = np.flatnonzero(LEAVES[target.statuses])
        for row in leaving.tolist():
            # Its consumer may have ended it, for what was handed out here was more than may wait.
            if (request := table.get(int(target.request_ids[row]))) is not None:
                self._leave(request, target, row, source)

    # Settling.

    def _settle(self, step: Step, slots: Slots, source: Source, now: float) -> Slots:
        table, target = self._table, step.rows
        settled: npt.NDArray[np.bool_] = (
            (table.stream[slots] == source.stream)
            & (table.next_position[slots] == target.positions)
            & (table.state[slots] == State.RUNNING)
            & (slots >= 0)
        )
        if settled.all():
            return slots
        keep = settled.copy()
        skip = np.zeros(slots.size, np.intp)
        for row in self._openable(step, np.flatnonzero(~settled), slots, source):
            place = self._place(step, row, source, now)
            if place is not None:
                keep[row] = True
                skip[row] = place
        draft = step.draft_rows
        if skip.any():
            target = target.between(skip, target.token_counts)
            draft = None  # it is about tokens that are partly known
        if not keep.all():
            target = target.select(np.flatnonzero(keep))
            if draft is not None:
                draft = draft.select(np.flatnonzero(np.isin(draft.request_ids, target.request_ids)))
        step.keep(target, draft)
        return table.slots_of(target.request_ids)

    def _openable(self, step: Step, rows: Rows, slots: Slots, source: Source) -> list[int]:
        """Return those of a step's rows whose request is open or may be opened, and count the others."""
        found: list[int] = rows.tolist()
        places: list[int] = rows[slots[rows] < 0].tolist()
        if not places:
            return found
        ids: list[int] = step.rows.request_ids.tolist()
        met = [row for row in places if not self._registry.is_over(ids[row], source)]
        refused = self._registry.refused(step.rows.request_ids[met], step.rows.positions[met], source)
        unknown = list(compress(met, refused))
        for row in unknown[:_MOST_TURNED_AWAY]:  # those that its worker brings again are turned away then
            self._registry.workers.abort(source.stream, ids[row])
        self.counts.late += len(places) - len(met)
        self.counts.unknown += len(unknown)
        left = set(places).difference(met).union(unknown)
        return [row for row in found if row not in left]

    def _place(self, step: Step, row: int, source: Source, now: float) -> int | None:
        """Return how many of a row's tokens its request has had, or None: the row is not for it."""
        table, target = self._table, step.rows
        request_id, position = int(target.request_ids[row]), int(target.positions[row])
        request = table.get(request_id)
        if request is None:
            if self._registry.is_over(request_id, source):  # as when a row before it ended it
                self.counts.late += 1
                return None
            request = self._registry.meet(request_id, position, source, now)
        state, stream = table.state_of(request), table.stream_of(request)
        if state is State.ENDED:  # its client has not asked for its tokens yet, and there will be no more
            self.counts.late += 1
            return None
        expected, count = int(table.next_position[request.slot]), int(target.token_counts[row])
        if position < expected and position + count <= expected:
            self.counts.repeated += stream == source.stream
            self.counts.foreign += stream != source.stream
            return None
        if stream not in (NO_STREAM, source.stream):
            self.counts.foreign += 1
            return None
        if position > expected:
            lost = f"tokens {expected} to {position - 1} never came from {source.name}"
            self._registry.fail(request, ErrorCode.ERROR_CODE_GAP, lost)
            return None
        if stream == NO_STREAM:
            table.go_on(request, source.stream)
        return expected - position

    # Their end.

    def _leave(self, request: Request, target: LogprobBatch, row: int, source: Source) -> None:
        source.owners.pop(request.id, None)
        if target.statuses[row] == RowStatus.HANDED_OFF:
            self._registry.on_prefilled(request, target.row(row).token_ids.tolist())
        else:
            self._registry.finish(request)
