"""Measure the gateway end to end: `python -m benchmarks.gateway`.

Worker, processor, gateway and clients are processes of their own on this machine.
"""

import re
import time
import urllib.request
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks.http_clients import keep_asking
from benchmarks.processes import PATIENCE, PROMPT, Child, below, deployed, processor_times
from benchmarks.report import Report, Row
from tests.system.deployment import COMMAND, Deployment
from tests.system.programs import Program

_CONNECTIONS = 256
_DEFAULT_ROWS = 512
_COMPLETION: dict[str, Any] = {
    "model": "tokenbus",
    "prompt": PROMPT,
    "max_tokens": 256,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
_CHAT = {name: value for name, value in _COMPLETION.items() if name != "prompt"} | {
    "messages": [{"role": "user", "content": PROMPT}],
    "logprobs": True,
}
_MODES: dict[str, dict[str, Any]] = {
    "none": _COMPLETION,
    "k = 0": _COMPLETION | {"logprobs": 0},
    "k = 20": _COMPLETION | {"logprobs": 20},
    "chat, k = 20": _CHAT | {"top_logprobs": 20},
    "columns, k = 20": _COMPLETION | {"logprobs": 20, "return_columns": True},
}
_TOKENS = "tokenbus_gateway_tokens_total"
_WAITS = "tokenbus_gateway_socket_latency_seconds_bucket"


class Sample(NamedTuple):
    """What one round of a mode saw."""

    tokens_per_second: float
    megabytes_per_second: float
    user: float
    """Cores that all processes of the gateway took together outside the kernel."""
    system: float
    """The same inside it: most of it is what sending costs."""
    waits: dict[float, float]
    """By a bucket's bound in seconds: how many rows took at most that, of all."""


class Load(NamedTuple):
    """What the gateway is measured under."""

    modes: Sequence[str]
    rounds: int
    seconds: float
    streams: int
    tokens: int
    """Of each answer."""
    speculate: int


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("gateway", __doc__)
    add = report.parser.add_argument
    add("--seconds", type=float, default=4.0, help="how long a round is measured (4)")
    add("--rounds", type=int, default=5, metavar="N", help="how many rounds of each (5)")
    add("--paces", default="40,80,0", help="steps a second; 0: as fast as it can (40,80,0)")
    add("--streams", type=int, default=_CONNECTIONS, metavar="N", help=f"at once ({_CONNECTIONS})")
    add("--speculate", type=int, default=3, metavar="N", help="tokens that the engine drafts a step; 0: one a step (3)")
    add("--tokens", type=int, default=_COMPLETION["max_tokens"], metavar="N", help="of each answer (256)")
    add("--modes", nargs="+", choices=list(_MODES), default=list(_MODES), metavar="MODE", help="which logprobs (all)")
    options = report.parse(arguments)
    paces = [20] if options.quick else [int(pace) for pace in options.paces.split(",")]
    rounds, seconds = (1, 0.5) if options.quick else (options.rounds, options.seconds)
    modes = options.modes[: 2 if options.quick else None]
    load = Load(modes, rounds, seconds, options.streams, options.tokens, options.speculate)
    report.say(f"{rounds} rounds of {seconds:g} s each, medians.")
    report.table(
        [
            _row(pace, mode, samples, found[modes[0]])
            for pace in paces
            for found in [_measured(pace, load)]
            for mode, samples in found.items()
        ]
    )
    report.write()


def _measured(pace: int, load: Load) -> dict[str, list[Sample]]:
    """Return the rounds of each mode at a pace; the modes are taken in turn."""
    samples: dict[str, list[Sample]] = {mode: [] for mode in load.modes}
    rows = max(_DEFAULT_ROWS, load.streams)
    with deployed(gateway__address="127.0.0.1:0", limits__max_rows=rows) as deployment, Child() as clients:
        deployment.start_processor()
        engine = ("--engine", "ngram", "--max-running", str(load.streams), "--speculate", str(load.speculate))
        deployment.start_worker("w0", *engine, "--steps-per-second", str(pace))
        gateway, address = _start_gateway(deployment)
        for _ in range(load.rounds):
            for mode in load.modes:
                path = "/v1/chat/completions" if "messages" in _MODES[mode] else "/v1/completions"
                body = _MODES[mode] | {"max_tokens": load.tokens}
                clients.begin(keep_asking, address, path, body, load.streams)
                time.sleep(min(1.0, load.seconds))  # until all have begun
                samples[mode].append(_round(gateway.pid, address, clients, load.seconds))
                clients.ask(False)  # noqa: FBT003 - the task's own word for the end
    return samples


def _start_gateway(deployment: Deployment) -> tuple[Program, str]:
    """Start a gateway; return it, and HOST:PORT once its requests find a worker."""
    gateway = deployment.start("gateway", [COMMAND, "gateway"])
    found = re.search(r'"http://([^"]+)"', gateway.wait_for('"listening"'))
    if found is None:
        raise RuntimeError(f"the gateway names no address: {gateway.output}")
    address = found[1]
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://{address}/readyz", timeout=PATIENCE):
                return gateway, address
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"the gateway finds no worker within {PATIENCE:g} s")


def _round(gateway: int, address: str, clients: Child, seconds: float) -> Sample:
    user, system = _times(gateway)
    before, began = _metrics(address), clients.ask(True)  # noqa: FBT003 - asks for the bytes so far
    end = time.monotonic() + PATIENCE
    time.sleep(seconds)
    while (after := _metrics(address))[_TOKENS] <= before[_TOKENS] and time.monotonic() < end:
        time.sleep(seconds)  # on a busy machine all may stand still for a while
    user, system = (now - then for now, then in zip(_times(gateway), (user, system), strict=True))
    ended = clients.ask(True)  # noqa: FBT003
    took = after["at"] - before["at"]
    waits = {
        float(bound[1]): after[key] - before.get(key, 0)
        for key in after
        if key.startswith(_WAITS) and (bound := re.search(r'le="([\d.]+)"', key))
    }
    megabytes = (ended - began) / 1e6 / took
    return Sample((after[_TOKENS] - before[_TOKENS]) / took, megabytes, user / took, system / took, waits)


def _times(gateway: int) -> tuple[float, float]:
    """Return the processor seconds of all of the gateway's processes, outside and inside the kernel."""
    user, system = zip(*map(processor_times, below(gateway)), strict=True)
    return sum(user), sum(system)


def _metrics(address: str) -> dict[str, float]:
    """Return the gateway's metrics, and when they were `at`."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE) as answer:
        text = answer.read().decode()
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs} | {"at": time.time()}


def _row(pace: int, mode: str, samples: Sequence[Sample], base: Sequence[Sample]) -> Row:
    of_none = median(a.tokens_per_second / b.tokens_per_second for a, b in zip(samples, base, strict=True))
    user_us, system_us = (
        median(getattr(each, of) / each.tokens_per_second for each in samples) * 1e6 for of in ("user", "system")
    )
    waits = {bound: sum(each.waits.get(bound, 0) for each in samples) for each in samples for bound in each.waits}
    return {
        "steps/s": pace or "as fast as it can",
        "logprobs": mode,
        "tokens/s": median(each.tokens_per_second for each in samples),
        "of none": of_none,
        "MB/s": median(each.megabytes_per_second for each in samples),
        "CPU": median(each.user + each.system for each in samples),
        "user, us a token": user_us,
        "system": system_us,
        "both": median((each.user + each.system) / each.tokens_per_second for each in samples) * 1e6,
        "to the socket, p50 ms": _quantile(waits, 0.5) * 1e3,
        "p99 ms": _quantile(waits, 0.99) * 1e3,
    }


def _quantile(waits: dict[float, float], share: float) -> float:
    """Return a quantile of counts in buckets, as Prometheus has it: within a bucket all are spread evenly."""
    total = max(waits.values(), default=0)
    below, at = 0.0, 0.0
    for bound in sorted(waits):
        if total and waits[bound] >= share * total:
            inside = waits[bound] - at
            return below + (bound - below) * ((share * total - at) / inside if inside else 0)
        below, at = bound, waits[bound]
    return below


if __name__ == "__main__":
    main()
