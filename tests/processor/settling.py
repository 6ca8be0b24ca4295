"""A router under test, and the slow model that says what it must do: one dict of plain values for each request."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np

from tests.in_process.builders import generate_of, row_values, settings, step_of
from tokenbus.delivery import PendingAck, Step
from tokenbus.delivery.slots import Slots
from tokenbus.delivery.step import FINISHED
from tokenbus.processor.dispatch import Dispatch
from tokenbus.processor.request_registry import RequestRegistry
from tokenbus.processor.requests import NO_OWNER, Request, Source
from tokenbus.processor.routed_rows import RoutedRows
from tokenbus.processor.router import Router
from tokenbus.processor.session import Session
from tokenbus.processor.workers import Workers
from tokenbus.settings import ProcessorSettings
from tokenbus.testing import ManualClock, RowShape, batch
from tokenbus_contracts import BatchKind, LogprobBatch, RowStatus
from tokenbus_contracts.generated.request_pb2 import Admitted, PromptScoresChunk, RequestError


def source(stream: int, *, is_resumed: bool = False, has: tuple[int, ...] = ()) -> Source:
    """Return where steps of a stream come from, whose worker said that it has some requests."""
    return Source(stream, f"worker-{stream}/7", is_resumed, dict.fromkeys(has, NO_OWNER))


class _Workers(Workers):
    """No workers, and what they would be asked to end."""

    def __init__(self, settings: ProcessorSettings, aborted: list[tuple[int, int]]) -> None:
        super().__init__(settings)
        self._aborted = aborted

    def abort(self, stream: int, request_id: int) -> None:
        """Remember what a stream's worker is asked to end."""
        self._aborted.append((stream, request_id))


class Recorder:
    """A consumer that keeps what it is given, and holds nothing."""

    name = ""
    keeps_up = knows_others = False

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.drafts: list[tuple[Any, ...]] = []
        self.statuses: dict[int, int] = {}
        self.finished: dict[int, RowStatus] = {}
        self.failed: dict[int, RequestError] = {}

    def deliver(self, step: Step, slots: Slots, routed: RoutedRows) -> None:
        mine = step.rows.select(routed.rows)
        assert slots.size == step.rows.row_count
        self.rows += [row_values(row) for row in mine.rows()]
        self.statuses.update(zip(mine.request_ids.tolist(), mine.statuses.tolist(), strict=True))
        if step.draft_rows is not None:
            of_mine = np.isin(step.draft_rows.request_ids, mine.request_ids)
            self.drafts += [row_values(row) for row in step.draft_rows.select(np.flatnonzero(of_mine)).rows()]

    def admitted(self, request: Request, admitted: Admitted) -> None:
        """Its worker does not matter here."""

    def scored(self, request: Request, chunk: PromptScoresChunk, pending_ack: PendingAck) -> None:
        """Prompts do not matter here."""

    def finish(self, request: Request) -> None:
        assert request.id not in self.finished | self.failed
        self.finished[request.id] = RowStatus(self.statuses[request.id])

    def put_error(self, error: RequestError) -> None:
        assert error.request_id not in self.finished | self.failed
        self.failed[error.request_id] = error


class Table:
    """A registry of requests whose rows go to recorders; each request was asked for, and has a stream."""

    def __init__(self, requests: dict[int, int], routes: int = 2, **processor: object) -> None:
        """Open requests, each at a stream, and spread them over the routes."""
        overrides = {f"processor.{name}": value for name, value in processor.items()}
        self.clock = ManualClock()
        self.aborted: list[tuple[int, int]] = []
        chosen = settings(overrides)
        workers = _Workers(chosen.processor, self.aborted)
        self.registry = RequestRegistry(chosen.processor, self.clock, workers)
        self.router = Router(Dispatch(chosen, self.registry, workers))
        self.recorders = {route: Recorder() for route in range(1, routes + 1)}
        self.registry.consumers.update(cast("dict[int, Session]", self.recorders))
        for place, (key, stream) in enumerate(requests.items()):
            self.registry.submit(generate_of(key), stream, 1 + place % routes, NO_OWNER)

    def route(self, target: LogprobBatch, stream: int, draft: LogprobBatch | None = None, **more: Any) -> Step:  # noqa: ANN401
        step = step_of(target, draft)
        origin = source(stream, **more)
        slots, routed = self.router.settle(step, origin, self.clock.now())
        self.router.deliver(step, slots, routed)
        self.router.close_finished(step, origin)
        return step

    def rows(self) -> list[tuple[Any, ...]]:
        return [row for recorder in self.recorders.values() for row in recorder.rows]

    def drafts(self) -> list[tuple[Any, ...]]:
        return [row for recorder in self.recorders.values() for row in recorder.drafts]

    def ends(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for recorder in self.recorders.values():
            found |= {key: status.name for key, status in recorder.finished.items()}
            found |= dict.fromkeys(recorder.failed, "failed")
        return found


class Arrival(NamedTuple):
    """A row that came from a stream, with its place in the original batch."""

    stream: int
    row: RowShape
    place: int
    step_rows: int


@dataclass
class Plain:
    """One request in the model."""

    owner: int | None
    next: int = 0
    end: str | None = None
    rows: list[tuple[Any, ...]] = field(default_factory=list)


class Model:
    """What must become of rows, said slowly: one row after the other."""

    def __init__(self, requests: dict[int, int]) -> None:
        self.requests = {key: Plain(stream) for key, stream in requests.items()}

    def arrive(self, arrival: Arrival) -> None:
        request, row = self.requests[arrival.row.request_id], arrival.row
        end = row.position + row.tokens
        if request.end is not None or (row.position < request.next and end <= request.next):
            return  # late, or no new token
        if request.owner not in (None, arrival.stream):
            return  # another worker's
        if row.position > request.next:
            request.end = "failed"
        else:
            self._deliver(request, arrival)

    def _deliver(self, request: Plain, arrival: Arrival) -> None:
        row = arrival.row
        end = row.position + row.tokens
        left = row._replace(position=request.next, tokens=end - request.next)
        made = batch([left], indices=[arrival.place], step_rows=arrival.step_rows)
        request.rows.append(row_values(made.row(0)))
        request.owner, request.next = arrival.stream, end
        if row.status in FINISHED:
            request.end = row.status.name


def draft_for(wanted: list[RowShape], step: int) -> LogprobBatch:
    drafted = [row._replace(status=RowStatus.ACTIVE if row.tokens else RowStatus.IDLE) for row in wanted]
    return batch(drafted, step=step, kind=BatchKind.DRAFT)
