"""Nightly: a machine with twenty busy loops ends no request, because a worker that computes is alive.

It needs real processes, which the loops keep from their turns.
"""

import pytest

from tests.support.busy import busy_loops
from tests.system.asking import all_exact, ask
from tests.system.deployment import Deployment, Overrides
from tokenbus.client import Client

_REQUESTS = 666
_SETTINGS: Overrides = {"bus__heartbeat_timeout_ms": 3000, "worker__max_requests": 1000}


@pytest.mark.nightly
async def test_no_worker_is_lost_beside_busy_loops(deployment: Deployment) -> None:
    deployment.start_processor(**_SETTINGS)
    deployment.start_worker("w0", "--steps-per-second", "20", **_SETTINGS)
    async with Client(deployment.settings(**_SETTINGS)) as client:
        with busy_loops(20):
            asked = ask(client, _REQUESTS, 40)
            await all_exact(asked, 40)
    assert {len(each.tokens.turns) for each in asked} == {1}
