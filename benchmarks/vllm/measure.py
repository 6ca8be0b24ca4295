"""A run: rounds of every cell, the systems taken in turn, as one record."""

import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.http_clients import ask_round
from benchmarks.processes import Child, TaskFailedError, below, processor_seconds
from benchmarks.report import progress
from benchmarks.vllm.cells import PATHS, Cell, Record, bodies, compare
from benchmarks.vllm.samples import MODEL, Sample, sample
from benchmarks.vllm.systems import ROOT, VLLM, Plan, System, environment_of, running

_TITLES = {"VLLM::Worker": MODEL, "VLLM::EngineCore": "core"}
"""What vLLM calls its processes, to which role each belongs."""
_IDLE_SECONDS = 3.0
_SETTLE_SECONDS = 1.2
"""A pause before each round: vLLM's processes wait for each other awake for up to a second after their last step."""
_WARM_UP = -1
_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Run:
    """What was measured."""

    plan: Plan
    vllm: str
    """Its version."""
    card: str | None
    answers: Record
    idle_cores: dict[str, float]
    rounds: dict[Cell, dict[str, list[Sample]]]


def run(plan: Plan, chosen: Sequence[Cell], rounds: int, max_tokens: int) -> Run:
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as name:
        folder = Path(name)
        with running(plan, folder) as systems, Child() as client:
            version = systems[VLLM].get("/version")["version"]
            progress("whether the answers are the same")
            endpoints = list(dict.fromkeys(cell.endpoint for cell in chosen))
            same = compare(systems, endpoints, plan.model.name)
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
    return Run(plan, version, _card(), same, idle, found)


def made_model(python: str, folder: Path) -> Path:
    made = folder / "tiny"
    command = [python, "-m", "benchmarks.vllm.model", str(made)]
    done = subprocess.run(command, cwd=ROOT, env=environment_of(folder), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotRunError(f"not run: the model cannot be made: {done.stderr.strip().splitlines()[-1]}")
    return made


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
    time.sleep(_SETTLE_SECONDS)
    before = {name: _seconds(system) for name, system in systems.items()}
    time.sleep(_IDLE_SECONDS)
    return {
        name: round(sum(_spent(before[name], _seconds(system)).values()) / _IDLE_SECONDS, 3)
        for name, system in systems.items()
    }


def _spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {role: used - before.get(role, 0.0) for role, used in after.items()}


def _seconds(system: System) -> dict[str, float]:
    """Return the processor seconds of each role so far: of its processes and of all below them.

    A process of vLLM's that runs the model, or its engine core, has a role of its own wherever it stands.
    """
    found = dict.fromkeys(system.roots, 0.0)
    for role, pids in system.roots.items():
        for pid in (each for root in pids for each in below(root)):
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
