"""The drop-in's benchmark: both lanes carry the same step, and the page says what came of it."""

import pytest

from benchmarks.codec.fastdeploy_struct import STRUCT_BYTES
from benchmarks.errors import NotRunError
from benchmarks.fastdeploy.__main__ import Figure, _turn
from benchmarks.fastdeploy.document import page
from benchmarks.fastdeploy.sides import DROP_IN, THEIRS
from benchmarks.sysv import queue_for
from tests.engines.fastdeploy.kernel import skip


@pytest.mark.parametrize("lane", [THEIRS, DROP_IN])
def test_lane_carries_steps_between_processes(lane: str) -> None:
    """Each step is got after it was saved, and what is got at the end is what was saved."""
    try:
        with queue_for(16 * STRUCT_BYTES) as queue:
            began, cost, got = _turn(lane, 64, 5, 20, 0.0, queue.identity)
    except NotRunError as why:
        skip(why)
    assert (got > began).all()
    assert (cost > 0).all()


def test_page_says_which_goals_are_met() -> None:
    """The goals of each size stand in the page, met or missed."""
    kernel, ours = (
        Figure(lane, 256, 0, p50, 900.0, 140.0, 70.0, 4000.0) for lane, p50 in ((THEIRS, 800.0), (DROP_IN, 300.0))
    )
    text = page([kernel, ours], {"cpu": "one"})
    assert "| p50, k = 0 | at most 1.0 | 0.38 | met |" in text
    assert "| 256 | 0 | drop-in | 300 | 900 | 140 | 70 | 4,000 |" in text
