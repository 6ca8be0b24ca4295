"""The campaign of kills, short; `make soak` runs many, with more requests."""

import random

import pytest

from tests.support.campaigns import many
from tests.system.campaign import VICTIMS, Campaign
from tests.system.deployment import Deployment


@pytest.mark.parametrize("seed", range(many(34, 1)))
async def test_nothing_is_lost_or_repeated_whichever_process_is_killed(deployment: Deployment, seed: int) -> None:
    """Processor, publisher, engine, worker and client are killed: each request has its tokens once and in order.

    A client's requests are resumed from what it had taken. Those of a dead engine are continued by the next one.
    """
    victims = [*VICTIMS, "processor"]
    random.Random(seed).shuffle(victims)  # noqa: S311 - a campaign can be run again
    figures = await Campaign(deployment, seed, requests=many(48, 8)).run(victims)
    assert figures.is_clean, figures
    assert figures.resumed == 4
    assert figures.continued >= 2
    assert figures.client_handshakes >= 3
    assert figures.tokens > 4000
