"""One attack: a system, a client that asks all the while, and stretches of time before, under and after the attack."""

import asyncio
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from benchmarks.attacks.attackers import ATTACKS, Attack
from benchmarks.attacks.systems import System, Target
from benchmarks.processes import Child, TaskFailedError, below, processor_seconds

_AT_ONCE = 8
_AFTER_SECONDS = 4.0
_LOOK_SECONDS = 0.2
_MOST_SECONDS = 60.0


class Stretch(NamedTuple):
    """What the victim and the attacked process did in some seconds."""

    longest_wait_s: float
    """The longest time without a token of an open request."""
    tokens_per_second: float
    failed: int
    """Requests that ended with an error, or with tokens that are not theirs."""
    peak_mib: float
    """The most memory of the process and of all below it."""
    cpu_s: float


class Figures(NamedTuple):
    """One attack: before it, under it, and from a second after it on."""

    attack: str
    control: Stretch
    under: Stretch
    after: Stretch


class _Victim:
    """Requests that follow each other, and how long each waits for its next token."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._waits = dict.fromkeys(range(_AT_ONCE), time.monotonic())
        self._longest, self._tokens, self._failed = 0.0, 0, 0
        self.asking = [asyncio.create_task(self._ask_on(place)) for place in self._waits]

    async def _ask_on(self, place: int) -> None:
        def tell(tokens: int) -> None:
            self._tokens += tokens
            self._waited(place)

        while True:
            if not await self._system.ask(tell):
                self._failed += 1
                await asyncio.sleep(0.1)
            self._waited(place)

    def _waited(self, place: int) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._waits[place])
        self._waits[place] = now

    async def stretch(self, seconds: float) -> Stretch:
        """Measure for some seconds; a wait that is not over counts as far as it has come."""
        self._longest, self._tokens, self._failed = 0.0, 0, 0
        began, cpu, peak = time.monotonic(), processor_seconds(self._system.attacked.pid), 0.0
        for place, since in self._waits.items():
            self._waits[place] = max(since, began)
        while (left := began + seconds - time.monotonic()) > 0:
            peak = max(peak, await asyncio.to_thread(_memory_mib, self._system.attacked.pid))
            await asyncio.sleep(min(_LOOK_SECONDS, left))
        now = time.monotonic()
        longest = max(self._longest, *(now - since for since in self._waits.values()))
        used = processor_seconds(self._system.attacked.pid) - cpu
        return Stretch(longest, self._tokens / (now - began), self._failed, peak, used)


async def measure(attack: str, seconds: float) -> Figures:
    """Measure one attack beside its control."""
    run, how = ATTACKS[attack]
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as folder:
        async with run(Path(folder)) as system:
            victim = _Victim(system)
            try:
                return Figures(attack, *await _measured(victim, system.target, how, seconds))
            finally:
                for task in victim.asking:
                    task.cancel()
                await asyncio.gather(*victim.asking, return_exceptions=True)


async def _measured(victim: _Victim, target: Target, how: Attack, seconds: float) -> tuple[Stretch, Stretch, Stretch]:
    await asyncio.sleep(1)  # what begins is not measured
    control = await victim.stretch(seconds)
    with Child() as attacker:
        attacker.begin(_attack, how, target, seconds)
        await asyncio.to_thread(attacker.answer)
        under = await victim.stretch(seconds)
        with suppress(TaskFailedError):  # an attacker that was refused, or does not end, is killed
            await asyncio.to_thread(attacker.answer, _MOST_SECONDS)
        await asyncio.sleep(1)
        return control, under, await victim.stretch(_AFTER_SECONDS)


def _attack(connection: Connection, how: Attack, target: Target, seconds: float) -> None:
    connection.send("begins")
    how(target, seconds)


def _memory_mib(pid: int) -> float:
    """Return the memory of a process and of all below it, what they share counted once."""
    found = 0
    for each in below(pid):
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended meanwhile
            continue
        found += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return found / 1024
