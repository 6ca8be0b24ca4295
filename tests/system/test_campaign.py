"""Campaigns of faults: a short one, and one for CAMPAIGN_SECONDS."""

import asyncio
import os
import random
from pathlib import Path

import pytest

from tests.support.nats_cluster import cluster, until_ready
from tests.system.asked_sessions import SessionFigures
from tests.system.deployment import Deployment
from tests.system.faults import USUAL, Faults
from tests.system.programs import tell

KILLS = ("kill_processor", "kill_publisher", "kill_engine", "kill_worker")
STOPS = ("stop_processor", "stop_publisher", "stop_engine")
_SECONDS = float(os.environ.get("CAMPAIGN_SECONDS") or 60)


def check(sessions: SessionFigures) -> None:
    tell(str(sessions))
    assert sessions.sessions
    assert not sessions.wrong, (sessions, sessions.wrong)
    assert not sessions.silent, (sessions, sessions.silent)


async def test_nothing_is_lost_or_repeated_whichever_process_is_killed(deployment: Deployment, tmp_path: Path) -> None:
    """Processors, publishers, engines, workers and a client are killed: each request has its tokens once and in order.

    A client's requests are resumed from what it had taken. Those of a dead engine are continued by another one.
    """
    deployment.overrides["worker.drain_timeout_ms"] = 2000  # which a publisher waits at the end for its processor
    kills = [*KILLS, "kill_engine", "kill_processor", "kill_client"]
    random.Random(0).shuffle(kills)  # noqa: S311 - a campaign can be run again
    faults = Faults(deployment, tmp_path, requests=8, roles=("prefill", "decode", "mixed"))
    figures = await faults.one_by_one(kills)
    assert not figures.wrong, figures
    assert figures.finished == figures.requests, figures
    assert figures.resumed == 4
    assert figures.turns >= figures.requests + 2
    assert figures.handshakes >= 3
    check(faults.recorded())


@pytest.mark.nightly
async def test_requests_go_on_through_faults_that_overlap(deployment: Deployment, tmp_path: Path) -> None:
    """Processors, engines and publishers are killed and stopped: no token is wrong, and 99 % of the requests finish."""
    deployment.overrides.update(USUAL)
    figures = await Faults(deployment, tmp_path, requests=32).at_random(KILLS + STOPS, _SECONDS, every=1.5)
    tell(str(figures))
    assert not figures.wrong, figures
    assert figures.finished >= 0.99 * figures.requests, figures


@pytest.mark.nightly
async def test_sessions_in_a_durable_log_are_complete_or_name_their_losses(
    deployment: Deployment, tmp_path: Path
) -> None:
    """Processors, engines, publishers and workers are killed and stopped while a log and an observer record them."""
    deployment.overrides.update(USUAL)
    with cluster(tmp_path) as nodes:
        deployment.overrides.update(
            {
                "durable_log.address": f"nats://{','.join(node.server for node in nodes)}/log",
                "durable_log.replicas": len(nodes),
                "durable_log.durable": True,
            }
        )
        await until_ready(deployment.settings())
        faults = Faults(deployment, tmp_path, requests=16)
        figures = await faults.at_random(KILLS + STOPS, _SECONDS, every=1.5)
        tell(str(figures))
        assert not figures.wrong, figures
        check(await asyncio.to_thread(faults.recorded))
        check(await asyncio.to_thread(faults.logged))
