"""Two processors are killed and stopped so often that their faults overlap, while requests follow each other.

`python -m tests.system.overlapping --faults 190` takes ten minutes and prints what was found. It fails unless
every request got its tokens, each once and in order, and ended without an error: workers and clients live throughout.
The processes meet over tcp, with keys.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.bus.keyed import Keyring
from tests.support import orphans
from tests.support.nats import NatsServer
from tests.support.ports import free_ports
from tests.system.asking import Asked, wanted
from tests.system.deployment import Deployment
from tests.system.programs import tell
from tests.system.several import Several
from tests.system.test_keys import keys_of, listening
from tokenbus.bus import Role
from tokenbus.client import Client
from tokenbus.logs import configure
from tokenbus.settings import LogSettings

_WORKERS = ("mixed-0", "mixed-1", "prefill-0", "prefill-1", "decode-0", "decode-1")
_CLIENTS = 4
_REQUESTS, _STEPS = 6, 300
"""How many requests each client has open, and how many steps a second each worker computes."""
_MOST_SECONDS = 90.0
_BETWEEN, _AWAY, _STILL = (0.5, 3.5), (0.0, 1.0), (0.2, 5.0)
"""How long one processor runs between two faults, is away after a kill, and stands still, in seconds."""
_LOOK_SECONDS = 0.05
_KILLS = 0.7
"""So many of the faults are kills."""


@dataclass(slots=True)
class Found:
    """What a campaign did, and what it found."""

    seed: int
    kills: int = 0
    stops: int = 0
    seconds: float = 0.0
    requests: int = 0
    tokens: int = 0
    inexact: int = 0
    unfinished: int = 0
    longest_standstill_ms: int = 0
    """Of one request between two of its rows, however many processors were there."""
    went_on_ms: int = 0
    """How long after the last fault the last of the open requests went on."""
    errors: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether every request got exactly its tokens, and ended without an error."""
        return not (self.inexact or self.unfinished or self.errors) and self.requests > 0


class _Watched(Asked):
    """A request, and how long it stood still."""

    standstill = 0.0

    async def _consume(self) -> Any:  # noqa: ANN401 - as Asked's
        watching = asyncio.create_task(self._watch())
        try:
            return await super()._consume()
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        seen, since = -1, time.monotonic()
        while True:
            if seen != self.audit.position:
                seen, since = self.audit.position, time.monotonic()
            self.standstill = max(self.standstill, time.monotonic() - since)
            await asyncio.sleep(_LOOK_SECONDS)


class Overlapping:
    """Two processors with faults of their own, six workers, and clients whose requests follow each other."""

    def __init__(self, several: Several, workers: dict[str, dict[str, Any]], client: dict[str, Any], seed: int) -> None:
        self._several = several
        self._workers = workers
        self._client = client
        self._random = random.Random(seed)  # noqa: S311 - a campaign can be run again
        self._faults = [random.Random(f"{seed} {place}") for place in (0, 1)]  # noqa: S311
        """What decides each processor's faults, whatever comes between them."""
        self._over = asyncio.Event()
        self._asked: list[_Watched] = []
        self.found = Found(seed)

    async def run(self, faults: int) -> Found:
        """Let each processor have so many faults, and return what was found once every request has ended."""
        await asyncio.to_thread(self._several.start_all)
        for name, own in self._workers.items():
            await asyncio.to_thread(self._several.worker, name, "--steps-per-second", str(_STEPS), **own)
        begin = time.monotonic()
        clients = [Client(self._several.settings(**self._client)) for _ in range(_CLIENTS)]
        async with clients[0], clients[1], clients[2], clients[3]:
            asking = [asyncio.create_task(self._ask_on(client)) for client in clients for _ in range(_REQUESTS)]
            await asyncio.gather(*(self._trouble(place, faults) for place in (0, 1)))
            self._over.set()
            self.found.went_on_ms = await self._until_all_go_on()
            _, pending = await asyncio.wait(asking, timeout=_MOST_SECONDS)
            for task in pending:
                task.cancel()
        self.found.unfinished = len(pending)
        self.found.seconds = round(time.monotonic() - begin, 1)
        self._sum_up()
        return self.found

    async def _until_all_go_on(self) -> int:
        """Wait until each open request has had its next row or its end, and return how long that took, in ms."""
        began = time.monotonic()
        waiting = [(each, each.audit.position) for each in self._asked if not each.task.done()]
        while waiting and time.monotonic() - began < _MOST_SECONDS:
            await asyncio.sleep(_LOOK_SECONDS)
            waiting = [(each, had) for each, had in waiting if each.audit.position == had and not each.task.done()]
        return round((time.monotonic() - began) * 1000)

    async def _trouble(self, place: int, faults: int) -> None:
        """Kill a processor, or let it stand still, again and again; at the end it is there."""
        chance = self._faults[place]
        for _ in range(faults):
            await asyncio.sleep(chance.uniform(*_BETWEEN))
            program = self._several.processors[place]
            if chance.random() < _KILLS:
                self.found.kills += 1
                await asyncio.to_thread(program.kill)
                await asyncio.sleep(chance.uniform(*_AWAY))
                await asyncio.to_thread(self._several.start, place, is_awaited=False)
            else:
                self.found.stops += 1
                await asyncio.to_thread(program.stop)
                await asyncio.sleep(chance.uniform(*_STILL))
                program.go_on()

    async def _ask_on(self, client: Client) -> None:
        while not self._over.is_set():
            asked = _Watched(client.generate(wanted(self._random.randrange(1, 900))))
            self._asked.append(asked)
            await asked.task

    def _sum_up(self) -> None:
        found = self.found
        for asked in self._asked:
            audit = asked.audit
            found.requests += 1
            found.tokens += audit.position
            found.inexact += not audit.is_exact
            found.longest_standstill_ms = max(found.longest_standstill_ms, round(asked.standstill * 1000))
            if audit.error is not None:
                found.errors.append(str(audit.error))


async def overlapping(deployment: Deployment, faults: int, seed: int) -> Found:
    """Run a campaign with a durable log that takes every item, and return what was found."""
    deployment.overrides |= {"processor.unclaimed_timeout_ms": 20_000, "client.drain_timeout_ms": 0}
    server = NatsServer(deployment.folder, f"jetstream {{ store_dir: '{deployment.folder}/js' }}\n")
    deployment.overrides["durable_log.address"] = f"nats://{server.server}"
    try:
        keyring = _keyring(deployment.folder)
        addresses = [[f"tcp://127.0.0.1:{port}" for port in free_ports(2)] for _ in range(2)]
        several = Several(deployment, addresses=addresses, **listening(keyring))
        workers: dict[str, dict[str, Any]] = {name: _role(name) | keys_of(keyring, name) for name in _WORKERS}
        return await Overlapping(several, workers, keys_of(keyring, "client"), seed).run(faults)
    finally:
        server.kill()


def _role(name: str) -> dict[str, Any]:
    role = name.partition("-")[0]
    return {"worker__role": role} | ({"worker__handoff_address": "tcp://127.0.0.1:0"} if role == "decode" else {})


def _keyring(folder: Path) -> Keyring:
    keyring = Keyring(folder)
    for name in (*_WORKERS, "client"):
        keyring.make(name)
    entries = [keyring.entry(name, Role.WORKER, Role.HANDOFF, names=(name,)) for name in _WORKERS]
    keyring.allow(*entries, keyring.entry("client", Role.CLIENT))
    return keyring


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=190, help="of each processor, some three seconds apart")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    configure(LogSettings(level="error"))
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        deployment = Deployment(Path(folder))
        try:
            found = asyncio.run(overlapping(deployment, options.faults, options.seed))
        finally:
            deployment.close()
    values = asdict(found)
    tell(json.dumps(values, indent=2) if options.json else "\n".join(f"{key:22} {values[key]}" for key in values))
    return 0 if found.is_clean else 1


if __name__ == "__main__":
    orphans.end_with_this_process()
    sys.exit(_main())
