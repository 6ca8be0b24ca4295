"""Progress: which rows of a step are the next of their requests, compared all at once."""

from collections import deque
from weakref import ref

from tokenbus.client.progress import Progress
from tokenbus.delivery.step import Step
from tokenbus.testing import RowShape, batch

SENDER = 1


def test_rows_that_are_next_are_counted() -> None:
    progress = Progress()
    for key in range(1, 101):
        progress.open(key, 5, deque())
        progress.set_sender(key, SENDER)
    for step in range(3):
        rows = [RowShape(key, 5 + step * (key % 3 + 1), key % 3 + 1) for key in range(1, 101)]
        assert progress.advance(SENDER, batch(rows))[1].tolist() == [True] * 100
    assert [progress.next_position(key) for key in (1, 2, 3, 100)] == [11, 14, 8, 11]


def test_rows_of_an_ended_request_are_not_kept() -> None:
    """What an ended request's reader left is let go with the reader, before another request takes its place."""
    progress, waiting = Progress(), deque[tuple[Step, int]]()
    progress.open(1, 0, waiting)
    kept = ref(waiting)
    progress.close(1)
    del waiting
    assert kept() is None
