"""Measure what attackers can do to another client: `python -m benchmarks.attacks`.

What is attacked runs as processes of its own, and so does the attacker; each attack has its control in the same run.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks.attacks.attackers import ATTACKS, Attack, attack_for
from benchmarks.attacks.systems import System, Target
from benchmarks.processes import Child, TaskFailedError, below, processor_seconds
from benchmarks.report import Report, Row, progress

_AT_ONCE = 8
_AFTER_SECONDS = 4.0
_LOOK_SECONDS = 0.2
_MOST_SECONDS = 60.0


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("attacks", __doc__)
    report.parser.add_argument("--seconds", type=float, default=12.0, help="how long each stretch is (12)")
    report.parser.add_argument("--attack", action="append", choices=list(ATTACKS), help="only this; may be repeated")
    options = report.parse(arguments)
    one_of_each = list({run: name for name, (run, _) in ATTACKS.items()}.values())
    names = options.attack or (one_of_each if options.quick else list(ATTACKS))
    seconds = 0.5 if options.quick else options.seconds
    report.say(f"Stretches of {seconds:g} s.")
    rows = []
    for place, name in enumerate(names, 1):
        progress(f"{place} of {len(names)}, {name}: {2 * seconds + 10:g} s")
        rows.append(asyncio.run(measure(name, seconds)))
    report.table(rows)
    report.write()


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


async def measure(attack: str, seconds: float) -> Row:
    """Measure what an attack does to the victim, beside the stretch before it."""
    run, how = ATTACKS[attack]
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as folder:
        async with run(Path(folder)) as system:
            victim = _Victim(system)
            try:
                control, under, after = await _measured(victim, system.target, how, seconds)
            finally:
                for task in victim.asking:
                    task.cancel()
                await asyncio.gather(*victim.asking, return_exceptions=True)
    return {
        "attack": attack,
        "share": under.tokens_per_second / control.tokens_per_second,
        "after": after.tokens_per_second / control.tokens_per_second,
        "longest wait without, s": control.longest_wait_s,
        "under it, s": under.longest_wait_s,
        "failed": under.failed,
        "more memory, MiB": under.peak_mib - control.peak_mib,
        "CPU without, s": control.cpu_s,
        "CPU under it, s": under.cpu_s,
    }


async def _measured(victim: _Victim, target: Target, how: Attack, seconds: float) -> tuple[Stretch, Stretch, Stretch]:
    await asyncio.sleep(min(seconds, 1))  # what begins is not measured
    control = await victim.stretch(seconds)
    with Child() as attacker:
        attacker.begin(attack_for, how, target, seconds)
        await asyncio.to_thread(attacker.answer)
        under = await victim.stretch(seconds)
        with suppress(TaskFailedError):  # an attacker that was refused, or does not end, is killed
            await asyncio.to_thread(attacker.answer, _MOST_SECONDS)
        await asyncio.sleep(min(seconds, 1))
        return control, under, await victim.stretch(min(seconds, _AFTER_SECONDS))


def _memory_mib(pid: int) -> float:
    found = 0
    for each in below(pid):
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended meanwhile
            continue
        found += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return found / 1024


if __name__ == "__main__":
    main()
