"""The system under attack: a processor and workers as processes, and a victim that asks all the while."""

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integration.asking import Asked, wanted
from tests.integration.audit import Audit
from tests.integration.deployment import Deployment, Overrides
from tests.integration.programs import Program
from tests.support.campaigns import IS_SOAK
from tests.support.waiting import MOST, soon
from tokenbus_services.bus.addresses import is_nats
from tokenbus_services.client import Client

AS_DEPLOYED: Overrides = {
    "bus.heartbeat_interval_ms": 1000,
    "bus.heartbeat_timeout_ms": 3000,
    "bus.reconnect_ms": 100,
}
"""The defaults, where the other tests' deployments have values of their own."""
_DEADLINE_MS = 10_000
_PATIENCE = 20
"""A request of the victim may take ten seconds, and twenty times as long as one took before the attack: a busy machine
is slow in both. That is far below what the attacks made of it.
"""
_MIB = 1024


def variants(*short: object, long: Sequence[object] = ()) -> list[object]:
    """Return the variants of an attack that are tried: a few, or all of them in `make soak`."""
    return [*short, *(long if IS_SOAK else ())]


class Victim:
    """A client whose requests follow each other, some at once; each must get every token of its own, and its end."""

    def __init__(self, client: Client, seed: int, tokens: int = 60, model: str = "", at_once: int = 2) -> None:
        self._client = client
        self._random = random.Random(seed)  # noqa: S311 - a test can be run again
        self._tokens = tokens
        self._model = model
        self._deadline_ms = int(MOST * 1000)
        self._over = False
        self._began = 0
        self.audits: dict[int, Audit] = {}
        self.asked: dict[int, Asked] = {}
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(at_once)]

    async def _ask(self) -> None:
        while not self._over:
            generate = wanted(self._tokens, self._model, key=self._random.getrandbits(63) | 1)
            generate.deadline_ms = self._deadline_ms
            self._began += 1
            number, asked = self._began, Asked(self._client.generate(generate))
            self.asked[number] = asked
            self.audits[number] = await asked.task
            del self.asked[number]

    async def is_served(self) -> None:
        """Wait until a request that begins after this call has ended, well or not."""
        last = self._began
        while not any(  # noqa: ASYNC110 - several tasks, one count
            number > last for number in self.audits
        ) and not all(task.done() for task in self._tasks):
            await asyncio.sleep(0.005)

    async def is_undisturbed(self) -> None:
        """Wait until it is served, and from now on expect that it takes not much longer."""
        await asyncio.wait_for(self.is_served(), MOST)
        began = time.monotonic()
        await asyncio.wait_for(self.is_served(), MOST)
        self._deadline_ms = _DEADLINE_MS + int(_PATIENCE * 1000 * (time.monotonic() - began))

    async def unharmed(self) -> None:
        """Fail unless every request got exactly its tokens and its end, one of them begun after this call."""
        await asyncio.wait_for(self.is_served(), 2 * MOST)
        self._over = True
        await soon(asyncio.gather(*self._tasks))
        for audit in self.audits.values():
            assert audit.error is None, audit.error
            assert audit.is_exact, audit
            assert audit.position == self._tokens

    def leave(self) -> None:
        for task in [*self._tasks, *(asked.task for asked in self.asked.values())]:
            task.cancel()


@dataclass(slots=True)
class Scene:
    """What is attacked, and where."""

    deployment: Deployment
    processor: Program
    workers: list[Program]
    victim: Victim
    client: Client
    clients: str
    """The clients' address."""
    workers_address: str

    def restart(self) -> None:
        """Kill the processor, and start another one at its addresses."""
        self.processor.kill()
        self.processor = self.deployment.start_processor()

    @property
    def peak(self) -> int:
        """The most memory that the processor has had, in MiB."""
        return peak_mib(self.processor.pid)


@asynccontextmanager
async def scene(  # noqa: PLR0913 - how it differs from test to test
    deployment: Deployment,
    *,
    workers: Sequence[str] = ("worker-0",),
    steps_per_second: int = 200,
    tokens: int = 60,
    model: str = "",
    before: Sequence[str] = (),
    **overrides: object,
) -> AsyncIterator[Scene]:
    """Run a processor, workers, and a victim; a worker's role begins its name, its model follows =.

    They meet over tcp, unless the deployment has addresses of NATS.
    """
    addresses = [str(deployment.overrides[f"bus.{key}_address"]) for key in ("workers", "clients")]
    if not all(map(is_nats, addresses)):
        addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
    deployment.overrides.update(AS_DEPLOYED)
    deployment.overrides.update({"bus.workers_address": addresses[0], "bus.clients_address": addresses[1]})
    deployment.overrides.update({name.replace("__", "."): value for name, value in overrides.items()})
    processor = await asyncio.to_thread(deployment.start_processor, before=before)
    started = await asyncio.gather(
        *(asyncio.to_thread(_worker, deployment, name, steps_per_second) for name in workers)
    )
    async with Client(deployment.settings(client__name="victim", client__drain_timeout_ms=0)) as client:
        victim = Victim(client, len(deployment.overrides), tokens, model)
        await victim.is_undisturbed()
        try:
            yield Scene(deployment, processor, started, victim, client, addresses[1], addresses[0])
        finally:
            victim.leave()


def _worker(deployment: Deployment, name: str, steps_per_second: int) -> Program:
    name, _, model = name.partition("=")
    role = name.partition("-")[0]
    said = ("--steps-per-second", str(steps_per_second), *(("--model", model) if model else ()))
    return deployment.start_worker(name, *said, worker__role="mixed" if role == "worker" else role)


def free_ports(count: int) -> list[int]:
    """Return some ports that are free, as a processor that is to come back at them must have."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def peak_mib(pid: int) -> int:
    """Return the most memory that a process has had, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) // _MIB


def repeat(attack: Callable[[], object], seconds: float, every: float = 0.0) -> None:
    """Attack again and again for some seconds, at a trickle or as fast as it goes."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        attack()
        time.sleep(every)
