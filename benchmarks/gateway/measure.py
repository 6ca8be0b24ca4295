"""Rounds of every mode at a pace, from the gateway's own metrics and what its clients count."""

import re
import statistics
import time
import urllib.request
from typing import Any, NamedTuple

from benchmarks.gateway.modes import BASE
from benchmarks.gateway.system import Load, running
from benchmarks.programs import PATIENCE


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
    processes: int
    mode: str
    tokens_per_second: float
    of_none: float
    megabytes_per_second: float
    gateway_cpu: float
    """Cores that all of its processes took together."""
    token_us: float
    """Processor time of all its processes for one token, in microseconds."""
    p50_ms: float
    p99_ms: float


def measure(
    pace: int, modes: dict[str, dict[str, Any]], rounds: int, seconds: float, gateways: int = 1
) -> list[Figures]:
    """Return what each mode does at a pace with so many processes; the rounds of the modes are taken in turn."""
    samples: dict[str, list[Sample]] = {mode: [] for mode in modes}
    with running(pace, gateways) as (address, load):
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
            for each, base in zip(taken, samples[BASE], strict=True)
        ]  # fmt: skip
        waits: dict[float, float] = {}
        for sample in taken:
            for bound, count in sample.waits.items():
                waits[bound] = waits.get(bound, 0) + count
        rate, megabytes, cpu = (statistics.median(values) for values in list(zip(*taken, strict=True))[:3])
        cost = statistics.median(each.gateway_cpu / each.tokens_per_second for each in taken) * 1e6
        quantiles = quantile(waits, 0.5) * 1e3, quantile(waits, 0.99) * 1e3
        ratio = statistics.median(ratios)
        found.append(Figures(pace, gateways, mode, rate, ratio, megabytes, cpu, cost, *quantiles))
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


def _round(address: str, load: Load, request: dict[str, Any], seconds: float) -> Sample:
    before, began = metrics_of(address), load.ask(request)
    time.sleep(seconds)
    after, ended = metrics_of(address), load.ask(request)
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


def metrics_of(address: str) -> dict[str, float]:
    """Return the gateway's metrics, and when they were `at`."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE) as answer:
        text = answer.read().decode()
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs} | {"at": time.time()}
