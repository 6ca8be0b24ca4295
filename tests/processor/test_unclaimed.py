"""Rows that wait for the clients of their requests, each for its own."""

import numpy as np

from tests.in_process.builders import step_of
from tokenbus.delivery import PendingAck
from tokenbus.processor.requests import Deadline, Request, RequestTable, State
from tokenbus.processor.step_parts import StepParts
from tokenbus.testing import RowShape, batch, row_shapes
from tokenbus_contracts.generated.request_pb2 import PromptScoresChunk


class Fixture:
    """Rows of some requests, each open at the table."""

    def __init__(self, *keys: int) -> None:
        self.table = RequestTable(100, 100, 100)
        self.requests = {key: self.open(key) for key in keys}

    def open(self, key: int) -> Request:
        return self.table.open(key, 0, 0, State.RUNNING, Deadline(1.0))

    def put(self, *wanted: RowShape, places: list[int] | None = None) -> PendingAck:
        """Put a step's rows, or some, and return their pending ack."""
        step = step_of(batch(wanted))
        is_mine = np.isin(np.arange(len(wanted)), range(len(wanted)) if places is None else places)
        *_, mine = StepParts(step.rows, is_mine.astype(np.int32))
        self.table.put_aside(step, self.table.slots_of(step.rows.request_keys), mine.rows)
        return step.pending_ack


def test_what_is_dropped_is_let_go() -> None:
    """Dropped rows and scores hold nothing back; those that were taken are the taker's to release."""
    made = Fixture(1, 2)
    pending_ack, scored = made.put(*row_shapes([1, 2])), PendingAck()
    scored.keep()
    made.requests[1].scores.append((PromptScoresChunk(), scored))
    made.table.drop_rows(made.requests[1])
    assert (pending_ack.count, scored.count, made.table.buffered_rows) == (2, 1, 1)
    assert len(made.table.take_rows(made.requests[2])) == 1
    assert (pending_ack.count, made.table.buffered_rows, made.requests[2].waiting) == (2, 0, [])
