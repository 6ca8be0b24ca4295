"""Faults of two processors that overlap, short; `make soak` runs them long."""

from tests.system.deployment import Deployment
from tests.system.overlapping import LIGHT, overlapping


async def test_processors_that_fail_together_end_no_request(deployment: Deployment) -> None:
    """Whichever processors are killed or stand still, requests whose workers and clients live get all their tokens."""
    found = await overlapping(deployment, faults=3, seed=4, load=LIGHT)
    assert found.is_clean, found
    assert (found.kills, found.stops) == (4, 2)
