"""Router: compares each row of a step with the state of its request, and delivers the new rows."""

from dataclasses import dataclass
from itertools import compress

import numpy as np
import numpy.typing as npt

from tokenbus.delivery import Step
from tokenbus.delivery.slots import Slots
from tokenbus.delivery.step import LEAVES
from tokenbus.processor.dispatch import Dispatch
from tokenbus.processor.requests import NO_STREAM, UNCLAIMED, Source, State
from tokenbus.processor.routed_rows import RoutedRows, Rows, split_message, split_rows
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import ErrorCode

_MAX_ABORTS = 16
"""Maximum number of unknown requests aborted per step, because an abort costs more than reading a step."""


@dataclass(slots=True)
class RowCounts:
    """Number of rows by outcome."""

    delivered: int = 0
    repeated: int = 0
    late: int = 0
    unknown: int = 0
    foreign: int = 0


class Router:
    """Delivers each row exactly once, and only if the row is at the next position of its request."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._registry = dispatch.registry
        self._table = dispatch.registry.table
        self.counts = RowCounts()

    # The intake calls the next three methods for each step, in this order.

    def settle(self, step: Step, source: Source, now: float) -> tuple[Slots, list[RoutedRows]]:
        """Remove the rows that are not new from a step, and advance the requests of the remaining rows.

        Returns the slots of the remaining rows, and these rows grouped by route.
        """
        slots = self._table.slots_of(step.rows.request_ids)
        routed = self._split(step, slots, source)
        if routed is None:
            slots = self._settle_rows(step, slots, source, now)
            routed = self._split(step, slots, source) or split_rows(step.rows, self._table.route[slots])
        self._table.advance(slots, step.rows.token_counts)
        return slots, routed

    def deliver(self, step: Step, slots: Slots, routed: list[RoutedRows]) -> None:
        self.counts.delivered += slots.size
        for rows in routed:
            if rows.route == UNCLAIMED:
                self._table.keep_rows(step, slots, rows.rows)
            elif (consumer := self._registry.consumers.get(rows.route)) is not None:  # else only steps() gets the rows
                consumer.deliver(step, slots, rows)

    def close_finished(self, step: Step, source: Source) -> None:
        """Close the requests that got their last row from this stream."""
        target = step.rows
        for row in np.flatnonzero(LEAVES[target.statuses]).tolist():
            request = self._table.get(int(target.request_ids[row]))
            if request is None:
                continue  # `deliver` has failed the request, because the client's send queue was overfull
            source.owners.pop(request.id, None)
            if target.statuses[row] == RowStatus.HANDED_OFF:
                self._dispatch.decode(request, target.row(row).token_ids.tolist())
            else:
                self._registry.finish(request)

    def _split(self, step: Step, slots: Slots, source: Source) -> list[RoutedRows] | None:
        if step.draft_rows is not None:
            return None
        return split_message(step.rows, slots, self._table.running, source.stream, UNCLAIMED + 1)

    # The slow path handles rows that are not at the next position of their request.

    def _settle_rows(self, step: Step, slots: Slots, source: Source, now: float) -> Slots:
        table, target = self._table, step.rows
        settled: npt.NDArray[np.bool_] = (
            (table.stream[slots] == source.stream)
            & (table.next_position[slots] == target.positions)
            & (table.state[slots] == State.RUNNING)
            & (slots >= 0)
        )
        if settled.all():
            return slots
        skip = np.zeros(slots.size, np.intp)
        for row in self._openable(step, np.flatnonzero(~settled), slots, source):
            known_tokens = self._known_tokens(step, row, source, now)
            if known_tokens is not None:
                settled[row] = True
                skip[row] = known_tokens
        draft = step.draft_rows
        if skip.any():
            target = target.between(skip, target.token_counts)
            draft = None  # the draft batch includes tokens that the client already has
        if not settled.all():
            target = target.select(np.flatnonzero(settled))
            if draft is not None:
                draft = draft.select(np.flatnonzero(np.isin(draft.request_ids, target.request_ids)))
        step.keep(target, draft)
        return table.slots_of(target.request_ids)

    def _openable(self, step: Step, rows: Rows, slots: Slots, source: Source) -> list[int]:
        """Return the rows whose request is open or may be opened, and count all other rows."""
        found: list[int] = rows.tolist()
        without_slot: list[int] = rows[slots[rows] < 0].tolist()
        if not without_slot:
            return found
        ids: list[int] = step.rows.request_ids.tolist()
        met = [row for row in without_slot if not self._registry.is_over(ids[row], source)]
        refused = self._registry.refused(step.rows.request_ids[met], step.rows.positions[met], source)
        unknown = list(compress(met, refused))
        for row in unknown[:_MAX_ABORTS]:  # further requests are aborted at the next step that contains them
            self._registry.workers.abort(source.stream, ids[row])
        self.counts.late += len(without_slot) - len(met)
        self.counts.unknown += len(unknown)
        dropped = set(without_slot).difference(met).union(unknown)
        return [row for row in found if row not in dropped]

    def _known_tokens(self, step: Step, row: int, source: Source, now: float) -> int | None:
        """Return the number of a row's tokens that its request already has, or None if the row is dropped."""
        table, target = self._table, step.rows
        request_id, position = int(target.request_ids[row]), int(target.positions[row])
        request = table.get(request_id)
        if request is None:
            if self._registry.is_over(request_id, source):  # an earlier row of this step may have ended the request
                self.counts.late += 1
                return None
            request = self._registry.open_unclaimed(request_id, position, source, now)
        state, stream = table.state_of(request), table.stream_of(request)
        if state is State.ENDED:  # the request is complete, and its rows wait for its client
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
            table.assign(request, source.stream)
        return expected - position
