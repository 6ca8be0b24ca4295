"""Campaigns of faults: a short one, and one for CAMPAIGN_SECONDS."""

import os
import random
from pathlib import Path

import pytest

from tests.system.deployment import Deployment
from tests.system.faults import USUAL, Faults
from tests.system.programs import tell

KILLS = ("kill_processor", "kill_publisher", "kill_engine", "kill_worker")
STOPS = ("stop_processor", "stop_publisher", "stop_engine")


async def test_nothing_is_lost_or_repeated_whichever_process_is_killed(deployment: Deployment, tmp_path: Path) -> None:
    """Processors, publishers, engines, workers and a client are killed: each request has its tokens once and in order.

    A client's requests are resumed from what it had taken. Those of a dead engine are continued by another one.
    """
    deployment.overrides["worker.drain_timeout_ms"] = 2000  # which a publisher waits at the end for its processor
    kills = [*KILLS, "kill_engine", "kill_processor", "kill_client"]
    random.Random(0).shuffle(kills)  # noqa: S311 - a campaign can be run again
    figures = await Faults(deployment, tmp_path, requests=8, roles=("prefill", "decode", "mixed")).one_by_one(kills)
    assert not figures.wrong, figures
    assert figures.finished == figures.requests, figures
    assert figures.resumed == 4
    assert figures.turns >= figures.requests + 2
    assert figures.handshakes >= 3


@pytest.mark.nightly
async def test_requests_go_on_through_faults_that_overlap(deployment: Deployment, tmp_path: Path) -> None:
    """Processors, engines and publishers are killed and stopped: no token is wrong, and 99 % of the requests finish."""
    deployment.overrides.update(USUAL)
    seconds = float(os.environ.get("CAMPAIGN_SECONDS") or 60)
    figures = await Faults(deployment, tmp_path, requests=32).at_random(KILLS + STOPS, seconds, every=1.5)
    tell(str(figures))
    assert not figures.wrong, figures
    assert figures.finished >= 0.99 * figures.requests, figures
