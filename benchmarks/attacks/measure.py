"""One attack: a system, a client that asks all the while, a stretch without and one with the attacker."""

import asyncio
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.integration.asking import wanted
from tests.integration.attacks.scene import AS_DEPLOYED, free_ports, peak_mib
from tests.integration.audit import Audit
from tests.integration.deployment import Deployment
from tests.integration.programs import Program
from tokenbus_services.client import Client
from tokenbus_services.delivery import RequestFailedError

_AT_ONCE = 8
_TOKENS = 300
_STEPS_PER_SECOND = 200


class Stretch(NamedTuple):
    """What the victim and the processor did in some seconds."""

    longest_wait_s: float
    """The longest time without a token of an open request."""
    tokens_per_second: float
    failed: int
    """Requests that ended with an error, or with tokens that are not theirs."""
    peak_mib: int
    cpu_s: float


class Figures(NamedTuple):
    """One attack: its control, and itself."""

    attack: str
    control: Stretch
    under: Stretch


@dataclass(slots=True)
class _Victim:
    """Requests that follow each other, and how long each waits for its next token."""

    client: Client
    waits: dict[int, float]
    longest: float = 0.0
    tokens: int = 0
    failed: int = 0

    async def ask_on(self, place: int) -> None:
        """Ask for ever."""
        while True:
            self.waits[place] = time.monotonic()
            tokens = self.client.generate(wanted(_TOKENS))
            audit = Audit(tokens.request_id)
            try:
                async for row in tokens.rows():
                    self._waited(place)
                    audit.take(row)
                    self.tokens += row.token_ids.size
            except RequestFailedError:
                self.failed += 1
                self._waited(place)
                await asyncio.sleep(0.1)
                continue
            self.failed += not audit.is_exact

    def _waited(self, place: int) -> None:
        now = time.monotonic()
        self.longest = max(self.longest, now - self.waits[place])
        self.waits[place] = now

    async def stretch(self, processor: Program, seconds: float) -> Stretch:
        """Measure for some seconds; a wait that is not over counts as far as it has come."""
        self.longest, self.tokens, self.failed = 0.0, 0, 0
        began, cpu = time.monotonic(), _cpu_seconds(processor.pid)
        for place in self.waits:
            self.waits[place] = max(self.waits[place], began)
        await asyncio.sleep(seconds)
        for place in self.waits:
            now = time.monotonic()
            self.longest = max(self.longest, now - self.waits[place])
        took = time.monotonic() - began
        pid = processor.pid
        return Stretch(self.longest, self.tokens / took, self.failed, peak_mib(pid), _cpu_seconds(pid) - cpu)


async def measure(attack: str, seconds: float) -> Figures:
    """Measure one attack beside its control."""
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as folder:
        ports = free_ports(2)
        workers, clients = (f"tcp://127.0.0.1:{port}" for port in ports)
        addresses = {"bus.workers_address": workers, "bus.clients_address": clients}
        deployment = Deployment(Path(folder), {**AS_DEPLOYED, **addresses})
        try:
            processor = await asyncio.to_thread(deployment.start_processor)
            pace = ("--steps-per-second", str(_STEPS_PER_SECOND))
            await asyncio.to_thread(deployment.start_worker, "worker-0", *pace)
            async with Client(deployment.settings(client__drain_timeout_ms=0)) as client:
                return await _measured(attack, seconds, processor, client, [clients, workers])
        finally:
            deployment.close()


async def _measured(attack: str, seconds: float, processor: Program, client: Client, addresses: list[str]) -> Figures:
    victim = _Victim(client, {})
    asking = [asyncio.create_task(victim.ask_on(place)) for place in range(_AT_ONCE)]
    await asyncio.sleep(1)  # what begins is not measured
    control = await victim.stretch(processor, seconds)
    command = [sys.executable, "-m", "benchmarks.attacks.attackers", attack, *addresses, str(seconds)]
    attacker = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        under = await victim.stretch(processor, seconds + 2)  # it takes a second to start
    finally:
        if attacker.returncode is None:
            attacker.kill()
        await attacker.wait()
        for task in asking:
            task.cancel()
    return Figures(attack, control, under)


def _cpu_seconds(pid: int) -> float:
    """Return how much of the cores' time a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
