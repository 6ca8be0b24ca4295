"""One run: a system with keys, a client that asks all the while, and the crowd that comes, and comes back."""

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from subprocess import PIPE
from typing import NamedTuple

from benchmarks.errors import NotRunError
from benchmarks.processes import processor_seconds
from tests.integration.asking import wanted
from tests.integration.attacks.scene import AS_DEPLOYED, free_ports, peak_mib
from tests.integration.deployment import Deployment
from tests.integration.programs import Program
from tokenbus_services.bus import Role
from tokenbus_services.bus.allowed import new_key, write_keys
from tokenbus_services.bus.keys import create_key, public_key
from tokenbus_services.client import Client
from tokenbus_services.delivery import RequestFailedError

_AT_ONCE = 8
_TOKENS = 3000
_STEPS_PER_SECOND = 40
_SETTLE_SECONDS = 3.0
_MOST_SECONDS = 120.0
_SPARE = 16


class Storm(NamedTuple):
    """What the crowd took, and what it cost."""

    name: str
    seconds: float
    """Until all of the crowd were connected."""
    share: float
    """Tokens/s of the client that was there before, until then, of those before the crowd came."""
    failed: int
    """Requests of that client that ended with an error."""
    growth_mib: float
    cpu_s: float
    """Of the processor."""


class _System:
    """The processor, whose life may be its second one, and the client that was there before."""

    def __init__(self, deployment: Deployment, client: Client) -> None:
        """Begin to ask."""
        self.deployment = deployment
        self.client = client
        self.tokens = self.failed = 0
        self.rate = 0.0
        self.idle_mib = 0.0
        self.asking = [asyncio.create_task(self._ask()) for _ in range(_AT_ONCE)]

    async def _ask(self) -> None:
        while True:
            try:
                async for row in self.client.generate(wanted(_TOKENS, "mine", top_logprobs=0)).rows():
                    self.tokens += row.token_ids.size
            except RequestFailedError:
                self.failed += 1
                await asyncio.sleep(0.1)

    async def settle(self, processor: Program) -> None:
        """Measure how it is before the crowd comes."""
        while not self.tokens:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.1)
        before, began = self.tokens, time.monotonic()
        await asyncio.sleep(_SETTLE_SECONDS)
        self.rate = (self.tokens - before) / (time.monotonic() - began)
        self.idle_mib = peak_mib(processor.pid)

    async def storm(self, name: str, processor: Program, crowd: asyncio.subprocess.Process, command: bytes) -> Storm:
        """Tell the crowd to connect, and wait until all of it are connected."""
        if crowd.stdin is None or crowd.stdout is None:
            raise RuntimeError("the crowd has no pipes")
        before, began, cpu = self.tokens, time.monotonic(), processor_seconds(processor.pid)
        crowd.stdin.write(command)
        try:
            async with asyncio.timeout(_MOST_SECONDS):
                await crowd.stdout.readline()
        except TimeoutError:
            raise NotRunError(f"not run: {name}: not all were connected within {_MOST_SECONDS:g} s") from None
        took = time.monotonic() - began
        share, growth = (self.tokens - before) / took / self.rate, peak_mib(processor.pid) - self.idle_mib
        failed, self.failed = self.failed, 0
        return Storm(name, took, share, failed, growth, processor_seconds(processor.pid) - cpu)


async def measure(clients: int, workers: int) -> list[Storm]:
    """Measure both storms."""
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as name:
        folder, ports = Path(name), free_ports(2)
        addresses = zip(("workers", "clients"), ports, strict=True)
        at = {f"bus.{kind}_address": f"tcp://127.0.0.1:{port}" for kind, port in addresses}
        for each in ("processor", "peer"):
            create_key(folder, each)
        public = public_key(str(folder / "peer.key")).decode()
        write_keys(folder / "allowed.toml", [new_key("peer", public, Role, ["*"])])
        keys = {"bus.key_file": f"{folder}/peer.key_secret", "bus.server_key": f"{folder}/processor.key"}
        room = {"clients.max_clients": clients + _SPARE, "processor.max_workers": workers + _SPARE}
        deployment = Deployment(folder, {**AS_DEPLOYED, "bus.reconnect_max_ms": 500, **at, **keys, **room})
        try:
            processor = await asyncio.to_thread(_start_processor, deployment)
            pace = ("--steps-per-second", str(_STEPS_PER_SECOND))
            await asyncio.to_thread(deployment.start_worker, "mine", *pace, worker__model="mine")
            async with Client(deployment.settings(client__drain_timeout_ms=0)) as client:
                system = _System(deployment, client)
                await system.settle(processor)
                return await _measured(system, processor, clients, workers)
        finally:
            deployment.close()


async def _measured(system: _System, processor: Program, clients: int, workers: int) -> list[Storm]:
    command = [sys.executable, "-m", "benchmarks.storm.crowd", str(clients), str(workers)]
    crowd = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, env=system.deployment.environment(client__drain_timeout_ms=0)
    )
    try:
        if crowd.stdout is None or await crowd.stdout.readline() != b"ready\n":
            raise NotRunError("not run: the crowd did not begin")
        first = await system.storm("they come", processor, crowd, b"go\n")
        await asyncio.to_thread(processor.kill)
        second = await asyncio.to_thread(_start_processor, system.deployment)
        return [first, await system.storm("the processor was restarted", second, crowd, b"again\n")]
    finally:
        crowd.kill()
        await crowd.wait()
        for task in system.asking:
            task.cancel()


def _start_processor(deployment: Deployment) -> Program:
    folder = deployment.folder
    return deployment.start_processor(
        bus__key_file=f"{folder}/processor.key_secret", bus__allowed_keys=f"{folder}/allowed.toml"
    )
