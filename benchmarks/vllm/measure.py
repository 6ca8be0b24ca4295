"""A run: rounds of every cell, the systems taken in turn; from what their requests saw to figures and ratios."""

import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.errors import WrongDeliveryError
from benchmarks.http_clients import Answer, ask_round
from benchmarks.processes import Child, TaskFailedError, below, processor_seconds
from benchmarks.report import progress
from benchmarks.vllm.cells import PATHS, Cell, Record, bodies, compare
from benchmarks.vllm.systems import VLLM, Plan, System, running

MODEL = "model"
"""The role of the process that runs the model."""
_TITLES = {"VLLM::Worker": MODEL, "VLLM::EngineCore": "core"}
"""What vLLM calls its processes, to which role each belongs."""
_IDLE_SECONDS = 3.0
_SETTLE_SECONDS = 1.2
"""A pause before each round: vLLM's processes wait for each other awake for up to a second after their last step."""
_WARM_UP = -1
_WARM_UP_TOKENS = 16


class Sample(NamedTuple):
    """One round of one system; times in milliseconds, processor time in microseconds a token."""

    tokens_per_second: float
    first_ms: float
    """Time to the first token, the median of the requests."""
    first_p99_ms: float
    between_ms: float
    """Time between tokens, the median of the requests."""
    between_p99_ms: float
    tokens_per_event: float
    bytes_per_token: float
    client_us: float
    outside_us: float | None
    """Processor time of all roles but the model's; None where no process of its own runs the model."""
    cpu_us: dict[str, float]
    """Processor time of each role."""


class Run(NamedTuple):
    """Everything that was measured."""

    vllm: str
    """Its version."""
    card: str | None
    answers: Record
    idle_cores: dict[str, float]
    rounds: dict[Cell, dict[str, list[Sample]]]


def run(plan: Plan, chosen: Sequence[Cell], rounds: int, max_tokens: int) -> Run:
    with running(plan) as systems, Child() as client:
        version = systems[VLLM].get("/version")["version"]
        progress("whether the answers are the same")
        same = compare(systems, list(dict.fromkeys(cell.endpoint for cell in chosen)), plan.model.name)
        idle = _idle(systems)
        found: dict[Cell, dict[str, list[Sample]]] = {cell: {name: [] for name in systems} for cell in chosen}
        for number in range(_WARM_UP, rounds):
            for at, cell in enumerate(chosen):
                progress(f"round {number + 1} of {rounds}: {cell.in_words}")
                tokens = min(max_tokens, _WARM_UP_TOKENS) if number == _WARM_UP else max_tokens
                wanted = bodies(cell, plan.model.name, tokens, number)
                for system in sorted(systems.values(), key=lambda each: each.name, reverse=(number + at) % 2 == 0):
                    taken = _round(client, system, cell, wanted, tokens)
                    if number != _WARM_UP:
                        found[cell][system.name].append(taken)
    return Run(version, _card(), same, idle, found)


def _round(client: Child, system: System, cell: Cell, wanted: list[list[dict[str, Any]]], max_tokens: int) -> Sample:
    time.sleep(_SETTLE_SECONDS)
    before = _seconds(system)
    client.begin(ask_round, system.addresses, PATHS[cell.endpoint], wanted)
    try:
        seen, client_cpu = client.answer()
    except TaskFailedError as error:
        raise WrongDeliveryError(f"{system.name}, {cell.in_words}: {error}") from None
    if len(seen) != sum(map(len, wanted)):
        raise WrongDeliveryError(f"{system.name}: {len(seen)} answers to {sum(map(len, wanted))} requests")
    return sample(seen, _spent(before, _seconds(system)), client_cpu, max_tokens)


def _idle(systems: dict[str, System]) -> dict[str, float]:
    """Return how many cores each system keeps busy while nothing is asked of it."""
    time.sleep(_SETTLE_SECONDS)
    before = {name: _seconds(system) for name, system in systems.items()}
    time.sleep(_IDLE_SECONDS)
    return {
        name: sum(_spent(before[name], _seconds(system)).values()) / _IDLE_SECONDS for name, system in systems.items()
    }


def _spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {role: used - before.get(role, 0.0) for role, used in after.items()}


def _seconds(system: System) -> dict[str, float]:
    """Return the processor seconds of each role so far: of its processes and of all below them.

    A process of vLLM's that runs the model, or its engine core, has a role of its own wherever it stands.
    """
    found = dict.fromkeys(system.roots, 0.0)
    for role, programs in system.roots.items():
        for pid in (each for program in programs for each in below(program.pid)):
            try:
                title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                own = next((each for begin, each in _TITLES.items() if title.startswith(begin)), role)
                found[own] = found.get(own, 0.0) + processor_seconds(pid)
            except OSError:  # it has ended meanwhile
                continue
    return found


def _card() -> str | None:
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],  # noqa: S607 - wherever it is
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return told.stdout.partition("\n")[0].strip() or None


def sample(answers: Sequence[Answer], cpu: dict[str, float], client_cpu: float, tokens_of_each: int) -> Sample:
    """Return the figures of a round; a WrongDeliveryError says that an answer is not as long as was asked."""
    wrong = next((each.tokens for each in answers if each.tokens != tokens_of_each), None)
    if wrong is not None:
        raise WrongDeliveryError(f"an answer has {wrong} tokens, of {tokens_of_each} that were asked for")
    tokens = sum(each.tokens for each in answers)
    took = max(each.ended for each in answers) - min(each.written for each in answers)
    first = [(each.first - each.written) * 1e3 for each in answers]
    between = [(each.ended - each.first) * 1e3 / max(1, each.tokens - 1) for each in answers]
    cpu_us = {role: seconds / tokens * 1e6 for role, seconds in cpu.items()}
    return Sample(
        tokens / took,
        statistics.median(first),
        _p99(first),
        statistics.median(between),
        _p99(between),
        tokens / sum(each.events for each in answers),
        sum(each.bytes for each in answers) / tokens,
        client_cpu / tokens * 1e6,
        sum(value for role, value in cpu_us.items() if role != MODEL) if MODEL in cpu_us else None,
        cpu_us,
    )


def _p99(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[-(-len(ordered) * 99 // 100) - 1]


def median(samples: Sequence[Sample], figure: Callable[[Sample], float | None]) -> float | None:
    """Return the median of a figure over the rounds; None where a round has none."""
    found = [value for each in samples if (value := figure(each)) is not None]
    return statistics.median(found) if len(found) == len(samples) else None


def ratio(ours: Sequence[Sample], theirs: Sequence[Sample]) -> float:
    """Return the median of the rounds' ratios of tokens a second: each round beside the one that was taken with it."""
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(mine.tokens_per_second / other.tokens_per_second for mine, other in pairs)
