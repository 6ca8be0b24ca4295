"""Progress: which rows of a step are the next of their requests, compared all at once."""

from collections import deque
from weakref import ref

import numpy as np
import pytest

from tokenbus.client.progress import MOST_POSITION, Progress
from tokenbus.delivery.step import Step
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import LogprobBatch, RowStatus

HERE, ELSEWHERE = 1, 2


def progress_of(*keys: int, position: int = 5) -> Progress:
    """Return the progress of requests that have come to a position, all from one session."""
    progress = Progress()
    for key in keys:
        progress.open(key, position, deque())
        progress.set_sender(key, HERE)
    return progress


def next_of(progress: Progress, *wanted: RowShape, sender: int = HERE) -> list[bool]:
    found: list[bool] = progress.advance(sender, batch(wanted))[1].tolist()
    return found


def test_rows_that_are_next_are_counted() -> None:
    """A step of many requests moves each by its own tokens, again and again."""
    progress = progress_of(*range(1, 101))
    for step in range(3):
        rows = [RowShape(key, 5 + step * (key % 3 + 1), key % 3 + 1) for key in range(1, 101)]
        assert all(next_of(progress, *rows))
    assert [progress.next_position(key) for key in (1, 2, 3, 100)] == [11, 14, 8, 11]


@pytest.mark.parametrize(
    "other",
    [
        RowShape(7, 5, 1),
        RowShape(2, 4, 1),
        RowShape(2, 6, 1),
        RowShape(2, 4, 2),
        RowShape(2, 5, 0, RowStatus.IDLE),
        RowShape(2, 5, 1, RowStatus.FINISHED_STOP),
        RowShape(2, 5, 0, RowStatus.HANDED_OFF),
    ],
    ids=["unknown", "repeated", "ahead", "overlapping", "idle", "last", "handed off"],
)
def test_other_rows_change_nothing(other: RowShape) -> None:
    """A row that is anything but the ordinary next one is left to be looked at, and those beside it are counted."""
    progress = progress_of(1, 2, 3)
    assert next_of(progress, RowShape(1, 5), other, RowShape(3, 5)) == [True, False, True]
    assert [progress.next_position(key) for key in (1, 2, 3)] == [6, 5, 6]


@pytest.mark.parametrize("position", [MOST_POSITION - 2, MOST_POSITION - 1, 2**32 - 2])
def test_row_beyond_what_can_be_counted_is_looked_at(position: int) -> None:
    progress = progress_of(1, position=min(position, MOST_POSITION))
    made = batch([RowShape(1, 5, 2)])
    far = LogprobBatch.of_views(made.header, made.columns | {"positions": np.array([position], np.uint32)})
    assert progress.advance(HERE, far)[1].tolist() == [position + 2 <= MOST_POSITION]


def test_rows_of_an_ended_request_are_not_kept() -> None:
    """What an ended request's reader left is let go with the reader, before another request takes its place."""
    progress, waiting = Progress(), deque[tuple[Step, int]]()
    progress.open(1, 0, waiting)
    kept = ref(waiting)
    progress.close(1)
    del waiting
    assert kept() is None
