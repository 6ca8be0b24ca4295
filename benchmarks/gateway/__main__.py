"""Measure the gateway end to end: `python -m benchmarks.gateway`.

Worker, processor, gateway and clients are processes of their own on this machine; 256 streams at once.
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.gateway.document import page
from benchmarks.gateway.measure import measure
from benchmarks.gateway.modes import MODES
from benchmarks.machine import Placement, description
from benchmarks.outputs import Record, declare_outputs, write_outputs


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round at one pace: whether it works")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long a round is measured (4)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how many rounds of each (5)")
    parser.add_argument("--paces", default="40,80,0", help="steps a second; 0: as fast as it can (40,80,0)")
    parser.add_argument("--processes", default="1", help="how many the gateway has; several are compared: 1,4 (1)")
    declare_outputs(parser, "gateway", has_plot=False)
    options = parser.parse_args(arguments)
    paces = [20] if options.quick else [int(pace) for pace in options.paces.split(",")]
    rounds, seconds = (1, 0.5) if options.quick else (options.rounds, options.seconds)
    modes = {name: MODES[name] for name in list(MODES)[: 2 if options.quick else None]}
    counts = [int(count) for count in options.processes.split(",")]
    figures = [
        each for pace in paces for count in counts for each in measure(pace, modes, rounds, seconds, count)
    ]  # fmt: skip
    machine = {name: value for name, value in description(Placement.here(), vllm=False).items() if name != "pinned"}
    text = page(figures, rounds, seconds, machine)
    sys.stdout.write(text)
    record: Record = {
        "machine": machine,
        "rounds": rounds,
        "figures": [each._asdict() for each in figures],
    }
    write_outputs(options, "gateway", record, lambda: text)


if __name__ == "__main__":
    main()
