"""Measure how the bus grows with processors, workers and readers: `python -m benchmarks.scaling`.

Workers run a synthetic engine, flat out, at steps of 256 rows of 3 tokens; clients read them as columns. Each cell is a
system of real processes that know all processors. As it is it fits the machine: with 16 cores or more it has up to 8
workers, 4 processors and 4 readers.
"""

import argparse
import os
from collections.abc import Sequence
from statistics import median

from benchmarks.errors import WrongDeliveryError
from benchmarks.report import Report, progress
from benchmarks.scaling.system import ROWS, Sample, Shape, sample

_TOP_K = 20


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("scaling", __doc__)
    add = report.parser.add_argument
    add("--rounds", type=int, default=3, metavar="N", help="how many rounds (3)")
    add("--seconds", type=float, default=4.0, metavar="S", help="how long each is measured (4)")
    add("--k", type=_top_k, default=0, metavar="K", help="alternatives of each token, or none (0)")
    add("--shapes", type=_shapes, metavar="W/P/R,...", help="workers, processors and readers of each system")
    options = report.parse(arguments)
    if options.quick:
        options.rounds, options.seconds, options.shapes = 1, 0.4, [Shape(1, 1, 1), Shape(2, 2, 1)]
    shapes = options.shapes or _shapes_for(os.cpu_count() or 1)
    report.say(f"{options.rounds} round(s) of {options.seconds:g} s in turn, medians, k = {options.k}.")
    found: dict[Shape, list[Sample]] = {shape: [] for shape in shapes}
    try:
        for number in range(options.rounds):
            for shape in shapes if number % 2 == 0 else reversed(shapes):
                progress(f"round {number + 1} of {options.rounds}: {shape}")
                found[shape].append(sample(shape, options.k, options.seconds))
    except WrongDeliveryError as error:
        report.fail(error)
    report.table(
        [
            shape._asdict()
            | {"steps/s": median(each.steps for each in taken)}
            | {f"{kind}, us a step": median(each.costs[kind] for each in taken) for kind in Shape._fields}
            | {f"{kind}, busiest": median(each.busiest[kind] for each in taken) for kind in Shape._fields}
            for shape, taken in found.items()
        ]
    )
    report.write()


def _shapes_for(cores: int) -> list[Shape]:
    """Return systems from one of each to what the cores are good for."""
    small = [Shape(1, 1, 1), Shape(1, 1, 2), Shape(1, 1, 4), Shape(2, 1, 1), Shape(2, 1, 2), Shape(2, 2, 2)]
    larger = [
        Shape(workers, processors, readers)
        for workers in (4, 8)
        for readers in (1, 2, 4)
        for processors in (1, 2, 4)
        if processors <= readers
    ]
    return small + [shape for shape in larger if cores >= sum(shape)]


def _shapes(text: str) -> list[Shape]:
    found = []
    for each in text.split(","):
        counts = [int(part) for part in each.split("/") if part.isdecimal()]
        if len(counts) != len(Shape._fields) or not all(counts) or counts[0] * ROWS % counts[2]:
            raise argparse.ArgumentTypeError(f"workers/processors/readers, each at least 1, got {each!r}")
        found.append(Shape(*counts))
    return found


def _top_k(text: str) -> int | None:
    if text != "none" and not (text.isdecimal() and int(text) <= _TOP_K):
        raise argparse.ArgumentTypeError(f"none, or 0 to {_TOP_K}, got {text!r}")
    return None if text == "none" else int(text)


if __name__ == "__main__":
    main()
