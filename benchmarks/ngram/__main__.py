"""Measure the ngram engine alone: `python -m benchmarks.ngram`."""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.machine import Placement, description, on_cores
from benchmarks.ngram.document import page
from benchmarks.ngram.measure import FULL, LONGEST, QUICK, build_seconds, measure
from benchmarks.outputs import Record, declare_outputs, write_outputs


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ngram", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three cases and few steps: whether it works")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="of each case (default 600, quick 30)")
    declare_outputs(parser, "ngram", has_plot=False)
    options = parser.parse_args(arguments)
    steps = options.steps or (30 if options.quick else 600)
    if not 1 <= steps <= LONGEST:
        parser.error(f"--steps: 1 to {LONGEST}, got {steps}")
    placement = Placement.here()
    with on_cores(placement.kept):
        built = build_seconds()
        figures = [(case, measure(case, steps)) for case in (QUICK if options.quick else FULL)]
    machine = description(placement, vllm=False)
    text = page(figures, built, steps, machine)
    sys.stdout.write(text)
    record: Record = {
        "machine": machine,
        "built_s": built,
        "steps": steps,
        "figures": [case._asdict() | found._asdict() for case, found in figures],
    }
    write_outputs(options, "ngram", record, lambda: text)


if __name__ == "__main__":
    main()
