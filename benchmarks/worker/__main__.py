"""Measure what a worker costs its engine, and the whole system with one: `python -m benchmarks.worker`."""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import Placement, description
from benchmarks.worker import system, thread

_RATE = 200.0
_TOP_KS = (0, 5, 20)
_ASKED = (None, 0, 5, 20)
_GOALS = {0: 40.0, 20: 150.0}
_TOKENS_GOAL = 100_000
_DOCUMENT = Path("docs/benchmarks/worker.md")
_ABOUT = """\
# What a worker costs its engine

Written by `python -m benchmarks.worker --write-docs`; [worker.json](worker.json) has every figure.

The first table is the processor time of the engine's thread for a step of 256 rows x 3 tokens, in microseconds: the
step's arrays are there, on the host, and 200 steps a second go to a processor in another process, which hands each to
an iterator. "Handed over" is what `tokenbus worker` does: its `Outbox` takes the step's arrays, and another thread
assembles and publishes them. An engine that calls `StepAssembler.assemble` and `Publisher.publish` itself pays "both".

The second is the ngram engine with its default options through three processes, `tokenbus worker`, `tokenbus processor`
and a `TokenClient` with 256 requests open all the time, on however many cores there are; medians of the rounds.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print or write the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps and one short round: whether it works")
    parser.add_argument("--write-docs", action="store_true", help=f"write {_DOCUMENT} and the JSON beside it, too")
    options = parser.parse_args(arguments)
    count, rounds, seconds = (60, 1, 0.5) if options.quick else (1000, 3, 5.0)
    costs = [
        thread.measure(top_k, count, _RATE, wide=wide)
        for top_k in (_TOP_KS[:1] if options.quick else _TOP_KS)
        for wide in (False, True)
    ]
    found: dict[int | None, list[float]] = {asked: [] for asked in _ASKED}
    for _ in range(rounds):
        for asked in random.sample(_ASKED, len(_ASKED)):
            found[asked].append(system.measure(asked, seconds))
    rates = {asked: statistics.median(each) for asked, each in found.items()}
    machine = description(Placement(None, frozenset()), vllm=False)
    text = f"{_ABOUT}\nMachine: {', '.join(f'{name}: {value}' for name, value in machine.items())}.\n\n"
    text += f"{_cost_table(costs)}\n{_rate_table(rates)}"
    sys.stdout.write(text)
    if options.write_docs:
        _DOCUMENT.write_text(text)
        record = {"machine": machine, "costs": [each._asdict() for each in costs], "rates": list(rates.items())}
        _DOCUMENT.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


def _cost_table(costs: Sequence[thread.Cost]) -> str:
    lines = ["| k | arrays | handed over | goal | assemble | publish | both |", "|---|---|---|---|---|---|---|"]
    for cost in costs:
        goal = _GOALS.get(cost.top_k)
        verdict = "" if goal is None else f"{goal:.0f}: {'met' if cost.handed_over <= goal else 'missed'}"
        lines.append(
            f"| {cost.top_k} | {cost.dtypes} | {cost.handed_over:.0f} | {verdict} "
            f"| {cost.assemble:.0f} | {cost.publish:.0f} | {cost.both:.0f} |"
        )
    return "\n".join([*lines, ""])


def _rate_table(rates: dict[int | None, float]) -> str:
    lines = ["| logprobs | tokens/s | of the rate without | goal |", "|---|---|---|---|"]
    for asked, rate in rates.items():
        name = "none" if asked is None else f"k = {asked}"
        verdict = "" if asked is None else f"{_TOKENS_GOAL:,}: {'met' if rate >= _TOKENS_GOAL else 'missed'}"
        lines.append(f"| {name} | {rate:,.0f} | {rate / rates[None]:.2f} | {verdict} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
