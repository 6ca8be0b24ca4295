"""Measure the gateway end to end: `python -m benchmarks.gateway`.

Worker, processor, gateway and clients are processes of their own on this machine; 256 streams at once.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gateway_load import CONNECTIONS
from benchmarks.machine import Placement, description

_DOCUMENT = Path("docs/benchmarks/gateway.md")
_RECORD = Path("docs/benchmarks/gateway.json")
_TOKENBUS = str(Path(sys.executable).with_name("tokenbus"))
_PROMPT = "In the evening the old man said"
_PATIENCE = 30.0
_GOALS = {"k = 0": 0.97, "k = 20": 0.85}
_MOST_P50_MS = 5.0
_BASE = "none"
_COMPLETION: dict[str, Any] = {
    "model": "tokenbus",
    "prompt": _PROMPT,
    "max_tokens": 256,
    "stream": True,
    "stream_options": {"include_usage": True},
}
_CHAT = {key: value for key, value in _COMPLETION.items() if key != "prompt"} | {
    "messages": [{"role": "user", "content": _PROMPT}],
    "logprobs": True,
}
MODES: dict[str, dict[str, Any]] = {
    _BASE: _COMPLETION,
    "k = 0": _COMPLETION | {"logprobs": 0},
    "k = 20": _COMPLETION | {"logprobs": 20},
    "chat, k = 20": _CHAT | {"top_logprobs": 20},
    "columns, k = 20": _COMPLETION | {"logprobs": 20, "return_columns": True},
}
_ABOUT = """\
# The gateway under load

Written by `python -m benchmarks.gateway --write-docs`. {streams} streams at once, each on a connection of its own, ask
for 256 tokens again and again; the ngram engine drafts 3 tokens a step. Worker, processor, gateway and the clients are
processes that share this machine's cores. "Of none" is the rate of tokens by that of the same pace without logprobs,
whose rounds are taken in turn with the others'; "to the socket" is from a row's publication by the worker until the
gateway has written it to its client's socket, for all rows of the time that was measured; "gateway CPU" is of one core.

The paces are what an engine on a GPU does with a batch of 256 (20 to 80 steps a second); "as fast as it can" is the
ngram engine without a pace: then the engine, which needs a few microseconds a token, takes part in a contest for the
cores, and the rates are those at which this machine as a whole is busy.
"""


class Sample(NamedTuple):
    """What one round saw."""

    tokens_per_second: float
    megabytes_per_second: float
    gateway_cpu: float
    waits: dict[float, float]
    """By a bucket's bound in seconds: how many rows took at most that, of all."""


class Figures(NamedTuple):
    """What came of one mode at one pace."""

    pace: int
    mode: str
    tokens_per_second: float
    of_none: float
    megabytes_per_second: float
    gateway_cpu: float
    p50_ms: float
    p99_ms: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print or write the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round at one pace: whether it works")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long a round is measured (4)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how many rounds of each (5)")
    parser.add_argument("--paces", default="40,80,0", help="steps a second; 0: as fast as it can (40,80,0)")
    parser.add_argument("--write-docs", action="store_true", help=f"write {_DOCUMENT} and {_RECORD}, too")
    options = parser.parse_args(arguments)
    paces = [20] if options.quick else [int(pace) for pace in options.paces.split(",")]
    rounds, seconds = (1, 0.5) if options.quick else (options.rounds, options.seconds)
    modes = {name: MODES[name] for name in list(MODES)[: 2 if options.quick else None]}
    figures = [each for pace in paces for each in measure(pace, modes, rounds, seconds)]
    described = description(Placement.here(), vllm=False)
    machine = ", ".join(f"{name}: {value}" for name, value in described.items() if name != "pinned")
    about = _ABOUT.format(streams=CONNECTIONS)
    text = f"{about}\n{rounds} rounds of {seconds:g} s each, medians. Machine: {machine}.\n\n{render(figures)}"
    sys.stdout.write(text)
    if options.write_docs:
        _DOCUMENT.write_text(text)
        record = {"machine": machine, "rounds": rounds, "figures": [each._asdict() for each in figures]}
        _RECORD.write_text(json.dumps(record, indent=2) + "\n")


def measure(pace: int, modes: dict[str, dict[str, Any]], rounds: int, seconds: float) -> list[Figures]:
    """Return what each mode does at a pace; their rounds are taken in turn."""
    samples: dict[str, list[Sample]] = {mode: [] for mode in modes}
    with running(pace) as (address, load):
        for _ in range(rounds):
            for mode, request in modes.items():
                load.ask(request)
                time.sleep(min(1.0, seconds))  # until all have begun
                samples[mode].append(_round(address, load, request, seconds))
                load.ask(None)
    found = []
    for mode, taken in samples.items():
        ratios = [
            each.tokens_per_second / base.tokens_per_second
            for each, base in zip(taken, samples[_BASE], strict=True)
        ]  # fmt: skip
        waits: dict[float, float] = {}
        for sample in taken:
            for bound, count in sample.waits.items():
                waits[bound] = waits.get(bound, 0) + count
        rate, megabytes, cpu = (statistics.median(values) for values in list(zip(*taken, strict=True))[:3])
        quantiles = quantile(waits, 0.5) * 1e3, quantile(waits, 0.99) * 1e3
        found.append(Figures(pace, mode, rate, statistics.median(ratios), megabytes, cpu, *quantiles))
    return found


def quantile(waits: dict[float, float], share: float) -> float:
    """Return a quantile of counts in buckets, as Prometheus has it: within a bucket all are spread evenly."""
    total = max(waits.values(), default=0)
    below, at = 0.0, 0.0
    for bound in sorted(waits):
        if total and waits[bound] >= share * total:
            inside = waits[bound] - at
            return below + (bound - below) * ((share * total - at) / inside if inside else 0)
        below, at = bound, waits[bound]
    return below


def render(figures: Sequence[Figures]) -> str:
    """Return the table, and what the goals come to."""
    lines = [
        "| steps/s | logprobs | tokens/s | of none | MB/s | gateway CPU | to the socket, p50 | p99 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in figures:
        pace = str(each.pace) if each.pace else "as fast as it can"
        lines.append(
            f"| {pace} | {each.mode} | {each.tokens_per_second:,.0f} | {each.of_none:.3f} "
            f"| {each.megabytes_per_second:.1f} | {each.gateway_cpu:.2f} "
            f"| {each.p50_ms:.2f} ms | {each.p99_ms:.1f} ms |"
        )
    lines += ["", "| goal | pace | found | |", "|---|---|---|---|"]
    for each in figures:
        pace = f"{each.pace} steps/s" if each.pace else "as fast as it can"
        if each.mode in _GOALS:
            goal = _GOALS[each.mode]
            met = "met" if each.of_none >= goal else "missed"
            lines.append(f"| {each.mode}: at least {goal} of none | {pace} | {each.of_none:.3f} | {met} |")
        met = "met" if each.p50_ms <= _MOST_P50_MS else "missed"
        lines.append(f"| {each.mode}: p50 to the socket at most 5 ms | {pace} | {each.p50_ms:.2f} ms | {met} |")
    return "\n".join([*lines, ""])


class Load:
    """The clients, in a process of their own."""

    def __init__(self, address: str) -> None:
        """Connect them."""
        command = [sys.executable, "-m", "benchmarks.gateway_load", *address.rsplit(":", 1)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, request: dict[str, Any] | None) -> dict[str, float]:
        """Ask for something from now on, and return what came so far."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise SystemExit("the clients have no pipes")
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise SystemExit("the clients ended")
        told: dict[str, float] = json.loads(line)
        return told

    def close(self) -> None:
        """End them."""
        self._process.kill()
        self._process.communicate()  # which closes its pipes, too


@contextmanager
def running(pace: int) -> Iterator[tuple[str, Load]]:
    """Run a processor, a worker and a gateway, and the clients."""
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as folder:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TOKENBUS_")} | {
            "TOKENBUS_BUS_WORKERS_ADDRESS": f"ipc://{folder}/w",
            "TOKENBUS_BUS_CLIENTS_ADDRESS": f"ipc://{folder}/c",
            "TOKENBUS_DEAD_LETTERS_DIRECTORY": f"{folder}/dead",
            "TOKENBUS_METRICS_ADDRESS": "",
            "TOKENBUS_GATEWAY_ADDRESS": "127.0.0.1:0",
            "TOKENBUS_LOG_FORMAT": "json",
        }
        log = Path(folder) / "gateway.log"
        commands = [
            ["processor"],
            ["worker", "--max-running", str(CONNECTIONS), "--steps-per-second", str(pace)],
            ["gateway"],
        ]
        processes = []
        with log.open("w") as file:
            for command in commands:
                output = file if command == ["gateway"] else subprocess.DEVNULL
                processes.append(subprocess.Popen([_TOKENBUS, *command], env=environment, stdout=output, stderr=output))
        load = None
        try:
            address = _listening(log)
            load = Load(address)
            yield address, load
        finally:
            if load is not None:
                load.close()
            for process in processes:
                process.kill()
                process.wait()


def _round(address: str, load: Load, request: dict[str, Any], seconds: float) -> Sample:
    before, began = _metrics(address), load.ask(request)
    time.sleep(seconds)
    after, ended = _metrics(address), load.ask(request)
    took = after["at"] - before["at"]
    name = "tokenbus_gateway_socket_latency_seconds_bucket"
    waits = {
        float(bound[1]): after[key] - before.get(key, 0)
        for key in after
        if key.startswith(name) and (bound := re.search(r'le="([\d.]+)"', key))
    }
    return Sample(
        (after["tokenbus_gateway_tokens_total"] - before["tokenbus_gateway_tokens_total"]) / took,
        (ended["bytes"] - began["bytes"]) / 1e6 / (ended["at"] - began["at"]),
        (after["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]) / took,
        waits,
    )


def _metrics(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=_PATIENCE) as answer:
        text = answer.read().decode()
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs} | {"at": time.time()}


def _listening(log: Path) -> str:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        if found := re.search(r'"listening".*"http://([^"]+)"', log.read_text()):
            return found[1]
        time.sleep(0.05)
    raise SystemExit(f"the gateway did not listen; it wrote:\n{log.read_text()}")


if __name__ == "__main__":
    main()
