"""Rows whose request no client has claimed yet: after a restart, workers may be back before clients."""

from tokenbus.delivery import Step
from tokenbus.delivery.slots import Slots
from tokenbus.processor.requests import Request, RequestTable
from tokenbus.processor.step_parts import Part


class UnclaimedRows:
    """Keeps rows, not acknowledged, until the client of their request resumes it."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self.count = 0
        """How many rows wait."""

    def put(self, step: Step, slots: Slots, part: Part) -> None:
        """Keep a part of a step, whose rows have these slots."""
        step.pending_ack.keep(part.rows.size)
        self.count += part.rows.size
        for slot, row in zip(slots[part.rows].tolist(), part.rows.tolist(), strict=True):
            self._table.at(slot).waiting.append((step, row))

    def take(self, request: Request) -> list[tuple[Step, int]]:
        """Return a request's rows, and forget them; the caller releases their pending acks."""
        waiting, request.waiting = request.waiting, []
        self.count -= len(waiting)
        return waiting

    def drop(self, request: Request) -> None:
        """Drop a request's rows and its prompt's scores."""
        for step, _ in self.take(request):
            step.pending_ack.release()
        for _, pending_ack in request.scores:
            pending_ack.release()
        request.scores = []
