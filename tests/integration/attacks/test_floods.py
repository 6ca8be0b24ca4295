"""Users of a NATS server that flood a processor: only they wait."""

import asyncio
import json
import re
import urllib.request
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from tests.integration.attacks.floods import AFTER, BEFORE, Flood, login, permissions
from tests.integration.attacks.scene import AS_DEPLOYED, Victim, peak_mib, variants
from tests.integration.deployment import Deployment
from tests.integration.programs import Program
from tests.support.nats import NatsServer
from tests.support.waiting import MOST
from tokenbus_services.client import Client

_REQUESTS = 6
_MOST_MIB = 256
WORKERS, CLIENTS = ("worker-0", "flooder-0", "flooder-1"), ("victim", "flooder-2")


class Scene:
    """A processor and a worker at a NATS server, and a victim that asks all the while."""

    def __init__(
        self, deployment: Deployment, server: NatsServer, processor: Program, victim: Victim, name: str
    ) -> None:
        self.deployment, self.server, self.processor, self.victim, self._name = (
            deployment,
            server,
            processor,
            victim,
            name,
        )

    def flood(self, user: str, kind: str) -> Flood:
        """Return a flood of the processor's by a user."""
        listeners, roles = ("workers", "worker") if user in WORKERS else ("clients", "client")
        return Flood(self.server.port, user, roles, f"{listeners}.{self._name}", kind)

    def dropped(self) -> dict[str, int]:
        """Return how many frames of each user the processor has dropped, as its metrics say."""
        address = json.loads(self.processor.wait_for('"serving metrics"'))["address"]
        with urllib.request.urlopen(f"{address}/metrics", timeout=MOST) as answer:  # noqa: S310
            found = re.findall(
                r'^tokenbus_dropped_frames_total{peer="(.*)"} (\d+)', answer.read().decode(), re.MULTILINE
            )
        return {name: int(count) for name, count in found}

    def client(self) -> Client:
        """Return a client like the victim's."""
        own = login(self.deployment.folder, "victim", "client")
        return Client(self.deployment.settings(**own, client__name="victim", client__drain_timeout_ms=0))


@pytest.fixture
async def scene(deployment: Deployment) -> AsyncIterator[Scene]:
    """Return a scene whose processor counts what it drops."""
    folder = deployment.folder
    server = NatsServer(folder, permissions(WORKERS, CLIENTS))
    # Nobody is to be cut off because the machine is busy.
    deployment.overrides.update({**AS_DEPLOYED, "bus.heartbeat_timeout_ms": 10_000})
    for kind in ("workers", "clients"):
        deployment.overrides[f"bus.{kind}_address"] = server.address(f"{kind}.*")
    try:
        processor = deployment.start_processor(metrics__address="127.0.0.1:0", **login(folder, "processor"))
        (name,) = set(re.findall(r"/workers\.([A-Za-z0-9_-]+)", processor.output))
        deployment.start_worker(**login(folder, "worker-0", "worker"))
        made = Scene(deployment, server, processor, None, name)  # type: ignore[arg-type]
        async with made.client() as client:
            made.victim = Victim(client, 11)
            await made.victim.is_undisturbed()
            try:
                yield made
            finally:
                made.victim.leave()
    finally:
        server.kill()


FLOODS = [
    *(("flooder-0", kind) for kind in ("new hellos", "hellos", "empty frames", "large frames")),
    *(("flooder-0", kind) for kind in ("a message that never ends", "messages that are none")),
    ("flooder-0+flooder-1+flooder-2", "new hellos"),
]
OTHERS = [
    *(("flooder-0", kind) for kind in (*BEFORE, *AFTER) if ("flooder-0", kind) not in FLOODS),
    *(("flooder-2", kind) for kind in (*BEFORE, *AFTER)),
]


@pytest.mark.parametrize(("users", "kind"), variants(*FLOODS, long=OTHERS))
async def test_flood_makes_only_its_own_user_wait(scene: Scene, users: str, kind: str) -> None:
    """While users flood a processor, the victim gets each token, a new client is served, and no one else is cut off."""
    with ExitStack() as floods:
        for user in users.split("+"):
            floods.enter_context(scene.flood(user, kind))
        for _ in range(_REQUESTS):
            await scene.victim.is_served()
        async with scene.client() as newcomer:
            assert (
                len([token async for token in newcomer.generate([1, 2, 3], max_tokens=8, ignore_end_token=True)]) == 8
            )
        await scene.victim.unharmed()
    counted = await asyncio.to_thread(scene.dropped)
    assert kind == "questions" or max(counted, key=counted.__getitem__, default="") in users.split("+")
    assert scene.processor.output.count('"event":"worker connected"') == 1
    assert '"resumed":true' not in scene.processor.output
    assert peak_mib(scene.processor.pid) < _MOST_MIB
