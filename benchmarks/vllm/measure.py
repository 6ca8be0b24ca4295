"""A run: rounds of every cell, the systems taken in turn; from what their requests saw to figures and ratios."""

import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.http_clients import Answer, ask_round
from benchmarks.processes import Child, TaskFailedError, answers_of, children, processor_seconds
from benchmarks.report import progress
from benchmarks.vllm.cells import PATH, Cell, bodies
from benchmarks.vllm.reader import TOKENS
from benchmarks.vllm.systems import ENGINE, Plan, System, running, vllm_version

MODEL = "model"
"""The role of the process that runs the model, where that is not the engine's own."""
INSIDE = (ENGINE, MODEL)
_TITLES = {"VLLM::Worker": MODEL, "VLLM::EngineCore": ENGINE}
"""What vLLM calls its processes, to which role each belongs."""
_BELOW = {ENGINE: "publisher"}
"""The role of what an engine's process starts and vLLM has no title for."""
_IDLE_SECONDS = 3.0
_SETTLE_SECONDS = 1.2
"""A pause before each round: vLLM's processes wait for each other awake for up to a second after their last step."""
_READER_SECONDS = 30.0
_LOOK_SECONDS = 0.01
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
    engine_us: float
    """Processor time of the engine's process and the model's."""
    outside_us: float
    """Processor time of all other processes of the system."""
    client_us: float
    client_busy: float
    """The share of a core that the busiest client took: near 1 it is the limit."""
    cpu_us: dict[str, float]
    """Processor time of each role."""

    @property
    def in_words(self) -> str:
        return (
            f"{self.tokens_per_second:,.0f} tokens/s, first {self.first_ms:,.0f} ms, engine {self.engine_us:.1f} us, "
            f"outside {self.outside_us:.1f} us, client {self.client_busy:.2f}"
        )


class Load(NamedTuple):
    """What is asked of the systems."""

    cells: Sequence[Cell]
    rounds: int
    """The most of each cell."""
    tokens: int
    """Of each answer."""
    clients: int
    """The processes that ask."""
    seconds: float
    """After which no round begins."""


class Run(NamedTuple):
    """Everything that was measured."""

    vllm: str
    """Its version."""
    card: str | None
    idle_cores: dict[str, float]
    rounds: dict[Cell, dict[str, list[Sample]]]


def run(plan: Plan, load: Load) -> Run:
    """Measure; a cell that has no round in time is left out."""
    begun = time.monotonic()
    with running(plan) as systems, ExitStack() as stack:
        asking = [stack.enter_context(Child()) for _ in range(load.clients)]
        progress(f"all have started after {time.monotonic() - begun:.0f} s")
        idle = _idle(systems)
        found: dict[Cell, dict[str, list[Sample]]] = {cell: {name: [] for name in systems} for cell in load.cells}
        for number in range(_WARM_UP, load.rounds):
            for at, cell in enumerate(load.cells):
                if time.monotonic() - begun > load.seconds:
                    progress(f"{load.seconds:g} s are over")
                    break
                progress(f"round {number + 1} of {load.rounds}: {cell.in_words}")
                tokens = min(load.tokens, _WARM_UP_TOKENS) if number == _WARM_UP else load.tokens
                masks = "--return-sampling-mask" in plan.engine_options
                wanted = bodies(cell, plan.model.name, tokens, number, wants_masks=masks)
                turn = (number + at) % len(systems)
                for system in [*systems.values()][turn:] + [*systems.values()][:turn]:
                    taken = _round(asking, system, cell, wanted, tokens)
                    progress(f"  {system.name}: {taken.in_words}")
                    if number != _WARM_UP:
                        found[cell][system.name].append(taken)
    measured = {cell: of for cell, of in found.items() if all(of.values())}
    if not measured:
        raise NotRunError(f"no round ended within {load.seconds:g} s")
    return Run(vllm_version(), _card(), idle, measured)


def _round(
    clients: Sequence[Child], system: System, cell: Cell, wanted: list[list[dict[str, Any]]], max_tokens: int
) -> Sample:
    time.sleep(_SETTLE_SECONDS)
    read = system.reader.ask(TOKENS) if system.reader else 0
    before = _seconds(system)
    try:
        seen, client_cpu = _asked(clients, system, wanted)
    except TaskFailedError as error:
        raise WrongDeliveryError(f"{system.name}, {cell.in_words}: {error}") from None
    if len(seen) != sum(map(len, wanted)):
        raise WrongDeliveryError(f"{system.name}: {len(seen)} answers to {sum(map(len, wanted))} requests")
    if system.reader:
        _await_tokens(system.reader, read + sum(each.tokens for each in seen))
    return sample(seen, _spent(before, _seconds(system)), client_cpu, max_tokens)


def _asked(
    clients: Sequence[Child], system: System, wanted: list[list[dict[str, Any]]]
) -> tuple[list[Answer], list[float]]:
    """Return what a system's requests saw, and the processor seconds of each client."""
    shares = [(client, share) for at, client in enumerate(clients) if (share := wanted[at :: len(clients)])]
    for client, share in shares:
        client.begin(ask_round, system.addresses, PATH, share)
    answers = answers_of(*(client for client, _ in shares))
    return [each for seen, _ in answers for each in seen], [seconds for _, seconds in answers]


def _await_tokens(reader: Child, tokens: int) -> None:
    """Wait until a reader of the stream has had so many tokens."""
    deadline = time.monotonic() + _READER_SECONDS
    while (read := reader.ask(TOKENS)) != tokens:
        if read > tokens or time.monotonic() > deadline:
            raise WrongDeliveryError(f"the reader of the stream has {read} tokens, of {tokens}")
        time.sleep(_LOOK_SECONDS)


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
    """Return the processor seconds of each role so far: of its processes and of all below them."""
    found = dict.fromkeys(system.roots, 0.0)
    for role, programs in system.roots.items():
        for pid, own in (each for program in programs for each in roles(program.pid, role)):
            try:
                found[own] = found.get(own, 0.0) + processor_seconds(pid)
            except OSError:  # it has ended meanwhile
                continue
    return found


def roles(pid: int, role: str) -> Iterator[tuple[int, str]]:
    """Yield a process and all below it, each with its role, which a title of vLLM's says before its parent does."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return
    own = next((each for begin, each in _TITLES.items() if title.startswith(begin)), role)
    yield pid, own
    for child in children(pid):
        yield from roles(child, _BELOW.get(own, own))


def _card() -> str | None:
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],  # noqa: S607 - wherever it is
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return told.stdout.partition("\n")[0].strip() or None


def sample(
    answers: Sequence[Answer], cpu: dict[str, float], client_cpu: Sequence[float], tokens_of_each: int
) -> Sample:
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
        sum(value for role, value in cpu_us.items() if role in INSIDE),
        sum(value for role, value in cpu_us.items() if role not in INSIDE),
        sum(client_cpu) / tokens * 1e6,
        max(client_cpu) / took,
        cpu_us,
    )


def _p99(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[-(-len(ordered) * 99 // 100) - 1]


def median(samples: Sequence[Sample], figure: Callable[[Sample], float]) -> float:
    """Return the median of a figure over the rounds."""
    return statistics.median(map(figure, samples))


def ratio(ours: Sequence[Sample], theirs: Sequence[Sample]) -> float:
    """Return the median of the rounds' ratios of tokens a second: each round beside the one that was taken with it."""
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(mine.tokens_per_second / other.tokens_per_second for mine, other in pairs)
