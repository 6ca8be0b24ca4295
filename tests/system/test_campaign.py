"""Campaigns of faults: a short one, and one for CAMPAIGN_SECONDS."""

import os
import random
from pathlib import Path

import pytest

from tests.system.campaign import VICTIMS, Campaign
from tests.system.deployment import Deployment
from tests.system.faults import Faults
from tests.system.programs import tell


async def test_nothing_is_lost_or_repeated_whichever_process_is_killed(deployment: Deployment) -> None:
    """Processor, publisher, engine, worker and client are killed: each request has its tokens once and in order.

    A client's requests are resumed from what it had taken. Those of a dead engine are continued by the next one.
    """
    victims = [*VICTIMS, "processor"]
    random.Random(0).shuffle(victims)  # noqa: S311 - a campaign can be run again
    figures = await Campaign(deployment, 0, requests=8).run(victims)
    assert figures.is_clean, figures
    assert figures.resumed == 4
    assert figures.continued >= 2
    assert figures.client_handshakes >= 3
    assert figures.tokens > 4000


@pytest.mark.nightly
async def test_requests_go_on_through_faults_that_overlap(deployment: Deployment, tmp_path: Path) -> None:
    """Processors, engines and publishers are killed and stopped: no token is wrong, and 99 % of the requests finish."""
    seconds = float(os.environ.get("CAMPAIGN_SECONDS") or 60)
    figures = await Faults(deployment, tmp_path, seed=0, requests=32).run(seconds, every=1.5)
    tell(str(figures))
    assert not figures.wrong, figures
    assert figures.finished >= 0.99 * figures.requests, figures
