"""From steps to requests: each row settled against what its request has had, then handed to its consumer."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestError
from tokenbus_services.delivery import Step
from tokenbus_services.delivery.final_statuses import LEAVES
from tokenbus_services.processor.requests import (
    NO_STREAM,
    EarlyRow,
    Request,
    RequestTable,
    Slots,
    Source,
    State,
)

BUFFERED = 0
"""The route of requests whose rows wait in a buffer of their own."""
NOBODY = -1
"""The route of requests that only `steps()` shows."""

Rows = npt.NDArray[np.intp]


class Consumer(Protocol):
    """Takes rows for the requests whose route leads to it."""

    def give(self, step: Step, slots: Slots, rows: Rows | None) -> None:
        """Take some rows of a step, or all; whoever keeps them counts that in the step's hold."""

    def finish(self, request: Request, status: RowStatus) -> None:
        """Learn that a request has had its last row."""

    def fail(self, request: Request, error: RequestError) -> None:
        """Learn that a request ended with an error."""


@dataclass(slots=True)
class RowCounts:
    """What became of rows, in rows."""

    delivered: int = 0
    tokens: int = 0
    repeated: int = 0
    late: int = 0
    unknown: int = 0
    early: int = 0
    foreign: int = 0


class Requests(Protocol):
    """Opens and ends requests, as the router finds cause to."""

    def meet(self, key: int, position: int, source: Source, now: float) -> Request | None:
        """Open a request that a stream brought, or return None: it cannot be one."""

    def hand_off(self, request: Request, now: float) -> None:
        """Let another stream go on with a request."""

    def finish(self, request: Request, status: RowStatus) -> None:
        """End a request that has had its last row."""

    def fail(self, request: Request, code: ErrorCode, message: str) -> None:
        """End a request with an error."""


class Router:
    """Settles steps and distributes their rows."""

    def __init__(self, table: RequestTable, requests: "Requests", max_early: int) -> None:
        """Take the table, who opens and ends requests, and how many rows of one may wait for what is before them."""
        self._table = table
        self._requests = requests
        self._max_early = max_early
        self.consumers: dict[int, Consumer] = {}
        self.counts = RowCounts()

    def route(self, step: Step, source: Source, now: float) -> None:
        """Hand each row that is new to its request to its consumer; the step keeps those rows alone."""
        table = self._table
        slots = self._settle(step, source, now)
        target = step.rows
        if not slots.size:
            return
        table.next_position[slots] += target.token_counts
        self.counts.delivered += slots.size
        self.counts.tokens += target.token_ids.size
        self._hand_out(step, slots)
        leaving = np.flatnonzero(LEAVES[target.statuses])
        for row in leaving.tolist():
            # Its consumer may have ended it, for what was handed out here was more than may wait.
            if (request := table.get(int(target.request_keys[row]))) is not None:
                self._leave(request, RowStatus(target.statuses[row]), now)

    # Settling.

    def _settle(self, step: Step, source: Source, now: float) -> Slots:
        table, target = self._table, step.rows
        slots = table.slots_of(target.request_keys)
        settled: npt.NDArray[np.bool_] = (
            (table.owner[slots] == source.stream)
            & (table.next_position[slots] == target.positions)
            & (table.state[slots] == State.OPEN)
            & (slots >= 0)
        )
        if settled.all():
            return slots
        keep = settled.copy()
        skip = np.zeros(slots.size, np.intp)
        for row in np.flatnonzero(~settled).tolist():
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
                draft = draft.select(np.flatnonzero(np.isin(draft.request_keys, target.request_keys)))
        step.keep(target, draft)
        return table.slots_of(target.request_keys)

    def _place(  # noqa: PLR0911 - one for each fate of a row
        self, step: Step, row: int, source: Source, now: float
    ) -> int | None:
        """Return how many of a row's tokens its request has had, or None: the row is not for it, or not yet."""
        table, target = self._table, step.rows
        key, position = int(target.request_keys[row]), int(target.positions[row])
        request = table.get(key) or self._met(key, position, source, now)
        if request is None:
            return None
        slot = request.slot
        state, owner, expected = State(table.state[slot]), int(table.owner[slot]), int(table.next_position[slot])
        if state is State.ENDED:  # nobody has asked for its tokens yet, and there will be no more
            self.counts.late += 1
            return None
        if state is State.WAITING:
            if position or owner not in (NO_STREAM, source.stream):
                self._wait(request, step, row, source)
                return None
            # Here is its beginning: all the rest follows, and is this stream's.
            table.next_position[slot] = expected = 0
            table.owner[slot], table.state[slot] = owner, state = source.stream, State.OPEN
        count = int(target.token_counts[row])
        if position < expected and position + count <= expected:
            if owner == source.stream:
                self.counts.repeated += 1
            else:
                self.counts.foreign += 1
            return None
        if position > expected and owner == source.stream:
            lost = f"tokens {expected} to {position - 1} never came from {source.name}"
            self._requests.fail(request, ErrorCode.ERROR_CODE_GAP, lost)
            return None
        if owner != source.stream:
            if position > expected or state is State.OPEN:
                self._wait(request, step, row, source)
                return None
            table.give(request, source.stream)
        return expected - position

    def _met(self, key: int, position: int, source: Source, now: float) -> Request | None:
        """Open a request that is met for the first time, if it can be one."""
        if self._table.ended(key) is not None:
            self.counts.late += 1
            return None
        request = self._requests.meet(key, position, source, now)
        if request is None:
            self.counts.unknown += 1
        return request

    def _wait(self, request: Request, step: Step, row: int, source: Source) -> None:
        """Keep a row until what is before it has come."""
        draft = step.draft_rows
        if draft is not None:
            draft = draft.select(np.flatnonzero(draft.request_keys == np.uint64(request.key)))
        step.pending_ack.keep()
        alone = Step(step.worker_id, step.epoch, step.number, step.rows.select([row]), draft, step.pending_ack)
        request.early.append(EarlyRow(source, alone))
        self.counts.early += 1
        expected = int(self._table.next_position[request.slot])
        while len(request.early) > self._max_early or _is_past(request.early[0].step, expected):
            request.early.pop(0).step.pending_ack.release()

    def recall(self, request: Request, now: float) -> None:
        """Look again at the rows that came early: they may be next."""
        rows = sorted(request.early, key=lambda early: int(early.step.rows.positions[0]))
        request.early = []
        for source, step in rows:
            self.route(step, source, now)  # what is still too early goes back to wait
            step.pending_ack.release()

    # Handing out.

    def _hand_out(self, step: Step, slots: Slots) -> None:
        routes = self._table.route[slots]
        first = int(routes[0])
        if (routes == first).all():
            self._give(first, step, slots, None)
            return
        for route in np.unique(routes).tolist():
            rows = np.flatnonzero(routes == route)
            self._give(route, step, slots[rows], rows)

    def _give(self, route: int, step: Step, slots: Slots, rows: Rows | None) -> None:
        if route != NOBODY:
            self.consumers[route].give(step, slots, rows)

    def _leave(self, request: Request, status: RowStatus, now: float) -> None:
        if status is not RowStatus.HANDED_OFF:
            self._requests.finish(request, status)
            return
        self._requests.hand_off(request, now)
        self.recall(request, now)


def _is_past(step: Step, expected: int) -> bool:
    return int(step.rows.positions[0]) + int(step.rows.token_counts[0]) < expected
