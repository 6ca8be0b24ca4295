"""A run: rounds of every cell, the systems taken in turn, as one record."""

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.outputs import Record, progress
from benchmarks.processes import seconds, spent
from benchmarks.vllm import answers
from benchmarks.vllm.cells import PATHS, Cell, bodies
from benchmarks.vllm.clients import Answer
from benchmarks.vllm.goals import goals_of
from benchmarks.vllm.samples import Sample, as_record, median, sample
from benchmarks.vllm.systems import ROOT, VLLM, Plan, System, environment_of, running

_IDLE_SECONDS = 3.0
_SETTLE_SECONDS = 1.2
"""A pause before each round: vLLM's processes wait for each other awake for up to a second after their last step."""
_WARM_UP = -1
_WARM_UP_TOKENS = 16
Rounds = dict[Cell, dict[str, list[Sample]]]


class Client:
    """The client of both systems, in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        """Take the process."""
        self._process = process

    def ask(self, system: System, cell: Cell, wanted: list[list[dict[str, Any]]]) -> tuple[list[Answer], float]:
        """Ask a system for a round, and return what its requests saw, and the client's processor seconds."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the client has no pipes")
        stdin.write(json.dumps({"addresses": system.addresses, "path": PATHS[cell.endpoint], "bodies": wanted}) + "\n")
        stdin.flush()
        told = json.loads(stdout.readline() or '{"error": "the client has ended"}')
        if "error" in told:
            raise WrongDeliveryError(f"{system.name}, {cell.in_words}: {told['error']}")
        return [Answer(*each) for stream in told["streams"] for each in stream], told["cpu"]


def run(plan: Plan, chosen: Sequence[Cell], rounds: int, max_tokens: int) -> Record:
    """Measure, and return the record."""
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as name:
        folder = Path(name)
        with running(plan, folder) as systems, _client(plan.python, folder) as client:
            version = systems[VLLM].get("/version")["version"]
            progress("whether the answers are the same")
            endpoints = list(dict.fromkeys(cell.endpoint for cell in chosen))
            same = answers.compare(systems, endpoints, plan.model.name)
            idle = _idle(systems)
            found: Rounds = {cell: {name: [] for name in systems} for cell in chosen}
            for number in range(_WARM_UP, rounds):
                for at, cell in enumerate(chosen):
                    progress(f"round {number + 1} of {rounds}: {cell.in_words}")
                    tokens = min(max_tokens, _WARM_UP_TOKENS) if number == _WARM_UP else max_tokens
                    wanted = bodies(cell, plan.model.name, tokens, number)
                    for system in sorted(systems.values(), key=lambda each: each.name, reverse=(number + at) % 2 == 0):
                        taken = _round(client, system, cell, wanted, tokens)
                        if number != _WARM_UP:
                            found[cell][system.name].append(taken)
    return {
        "benchmark": "vllm",
        "vllm": version,
        "machine": _machine(plan.python),
        "engine_options": list(plan.engine_options),
        "gateways": plan.gateways,
        "api_servers": plan.api_servers,
        "rounds": rounds,
        "max_tokens": max_tokens,
        "answers": same,
        "idle_cores": idle,
        **figures_of(found, same, _card()),
    }


def figures_of(found: Rounds, same: Record, card: str | None) -> Record:
    """Return the part of a record that comes from the rounds: their figures, and the goals."""
    return {
        "card": card,
        "cells": [
            {
                "endpoint": cell.endpoint,
                "top_k": cell.top_k_name,
                "streams": cell.streams,
                "medians": {name: as_record(median(of)) for name, of in taken.items()},
                "rounds": {name: [as_record(each) for each in of] for name, of in taken.items()},
            }
            for cell, taken in found.items()
        ],
        "goals": goals_of(found, same, on_card=card is not None),
    }


def made_model(python: str, folder: Path) -> Path:
    """Make the tiny model by the interpreter that has vLLM, and return its folder."""
    made = folder / "tiny"
    command = [python, "-m", "benchmarks.vllm.model", str(made)]
    done = subprocess.run(command, cwd=ROOT, env=environment_of(folder), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotRunError(f"not run: the model cannot be made: {done.stderr.strip().splitlines()[-1]}")
    return made


def _round(client: Client, system: System, cell: Cell, wanted: list[list[dict[str, Any]]], max_tokens: int) -> Sample:
    time.sleep(_SETTLE_SECONDS)
    before = seconds(system.roots)
    seen, client_cpu = client.ask(system, cell, wanted)
    if len(seen) != sum(map(len, wanted)):
        raise WrongDeliveryError(f"{system.name}: {len(seen)} answers to {sum(map(len, wanted))} requests")
    return sample(seen, spent(before, seconds(system.roots)), client_cpu, max_tokens)


def _idle(systems: dict[str, System]) -> dict[str, float]:
    """Return how many cores each system keeps busy while nothing is asked of it."""
    time.sleep(_SETTLE_SECONDS)
    before = {name: seconds(system.roots) for name, system in systems.items()}
    time.sleep(_IDLE_SECONDS)
    return {
        name: round(sum(spent(before[name], seconds(system.roots)).values()) / _IDLE_SECONDS, 3)
        for name, system in systems.items()
    }


@contextmanager
def _client(python: str, folder: Path) -> Iterator[Client]:
    command = [python, "-m", "benchmarks.vllm.clients"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment_of(folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Client(process)
        finally:
            process.kill()


def _machine(python: str) -> dict[str, str]:
    """Return the machine, and the libraries of the interpreter that has vLLM."""
    code = (
        "import json; from benchmarks.machine import Placement, description; "
        "print(json.dumps(description(Placement.here(), vllm=False)))"
    )
    with tempfile.TemporaryDirectory() as folder:
        told = subprocess.run(
            [python, "-c", code],
            cwd=ROOT, env=environment_of(Path(folder)), check=True, capture_output=True, text=True,
        )  # fmt: skip
    found: dict[str, str] = json.loads(told.stdout)
    return {name: value for name, value in found.items() if name != "pinned"}


def _card() -> str | None:
    """Return the name of the card, if there is one."""
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],  # noqa: S607 - wherever it is
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return told.stdout.partition("\n")[0].strip() or None
