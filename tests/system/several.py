"""Two processors and more of a test's own: workers and clients have a list of them."""

import json
from typing import Any

from tests.support.waiting import until
from tests.system.deployment import COMMAND, Deployment, Overrides
from tests.system.programs import Program
from tokenbus.bus.link import SessionState
from tokenbus.client import Client
from tokenbus.client.session import ClientSession
from tokenbus.settings import Settings

SHORT: Overrides = {
    "bus__heartbeat_ms": 500,
    "bus__heartbeat_timeout_ms": 2500,
    "processor__unclaimed_timeout_ms": 20_000,
    "worker__drain_timeout_ms": 20_000,
}


class Several:
    """The processors of a deployment, each at addresses of its own."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        folder = deployment.folder
        self._places = [[f"ipc://{folder}/{place}{kind}" for kind in "wc"] for place in range(2)]
        workers, clients = (",".join(each) for each in zip(*self._places, strict=True))
        self._all = {"bus__workers_address": workers, "bus__clients_address": clients}
        self.processors: dict[int, Program] = {}

    def start(self, place: int) -> Program:
        workers, clients = self._places[place]
        program = self._deployment.start_processor(
            processor__id=f"processor-{place}", bus__workers_address=workers, bus__clients_address=clients, **SHORT
        )
        self.processors[place] = program
        return program

    def start_all(self) -> None:
        for place in range(len(self._places)):
            self.start(place)

    def worker(
        self,
        name: str,
        *arguments: str,
        place: int | None = None,
        model: str = "",
        **more: Any,  # noqa: ANN401 - settings
    ) -> Program:
        own = self._all if place is None else {"bus__workers_address": self._places[place][0]}
        return self._deployment.start_worker(name, *arguments, **own, **SHORT, worker__model=model, **more)

    def gateway(self) -> tuple[Program, str]:
        own = {"gateway__address": "127.0.0.1:0", "gateway__tokenizer": "numbers", "gateway__drain_timeout_ms": 30_000}
        program = self._deployment.start("gateway", [COMMAND, "gateway"], **self._all, **SHORT, **own)
        program.wait_for('"connected"', len(self.processors))
        return program, str(json.loads(program.wait_for('"listening"'))["address"])

    def tap(self, *arguments: str) -> Program:
        return self._deployment.start("tap", [COMMAND, "tap", *arguments], **self._all, **SHORT)

    def settings(self, **overrides: object) -> Settings:
        return self._deployment.settings(**self._all, **SHORT, **overrides)

    async def connected(self, client: Client) -> list[ClientSession]:
        """Wait until a client is connected to every processor that was started, and return its sessions by place."""

        def sessions() -> list[ClientSession]:
            open_ones = {each.processor_id.split("-")[1]: each for each in client.sessions if is_open(each)}
            return [open_ones[str(place)] for place in self.processors if str(place) in open_ones]

        await until(lambda: len(sessions()) == len(self.processors))
        return sessions()

    async def ready(self, client: Client) -> list[ClientSession]:
        sessions = await self.connected(client)
        serving = {worker.processor_id for worker in (await client.status(timeout_seconds=30)).workers}
        await until(lambda: all(each.room_for("") > 0 for each in sessions if each.processor_id in serving))
        return sessions


def is_open(session: ClientSession) -> bool:
    return session.state is SessionState.OPEN
