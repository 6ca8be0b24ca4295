"""A machine with much more to do than it has processors: what is slow is not dead."""

import sys

import pytest

from tests.system.asking import all_exact, ask
from tests.system.deployment import Deployment, Overrides
from tokenbus.client import Client

_LOOPS, _REQUESTS, _TOKENS = 20, 666, 10


@pytest.mark.nightly
async def test_busy_machine_ends_no_request(deployment: Deployment) -> None:
    """The times are those of a deployment. Each process may have to wait for its turn for longer than they say."""
    times: Overrides = {"bus__heartbeat_ms": 1000, "bus__heartbeat_timeout_ms": 3000}
    deployment.start_processor(**times)
    deployment.start_worker(**times)
    async with Client(deployment.settings(**times)) as client:
        for number in range(_LOOPS):
            deployment.start(f"loop-{number}", [sys.executable, "-c", "while True: pass"])
        await all_exact(ask(client, _REQUESTS, _TOKENS), _TOKENS)
