"""Measure what a worker costs its engine, and the whole system with one: `python -m benchmarks.worker`."""

import argparse
import random
import statistics
import sys
from collections.abc import Sequence

from benchmarks.machine import Placement, description
from benchmarks.outputs import Record, declare_outputs, write_outputs
from benchmarks.worker import system, thread
from benchmarks.worker.document import page

_RATE = 200.0
_TOP_KS = (0, 5, 20)
_ASKED = (None, 0, 5, 20)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps and one short round: whether it works")
    declare_outputs(parser, "worker", has_plot=False)
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
    text = page(costs, rates, machine)
    sys.stdout.write(text)
    record: Record = {
        "machine": machine,
        "costs": [each._asdict() for each in costs],
        "rates": list(rates.items()),
    }
    write_outputs(options, "worker", record, lambda: text)


if __name__ == "__main__":
    main()
