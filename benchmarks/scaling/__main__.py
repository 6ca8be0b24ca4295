"""Measure how the bus grows with processors, workers and readers: `python -m benchmarks.scaling`.

Workers run a synthetic engine at steps of 256 rows of 3 tokens. They are read by clients that take them as columns,
flat out, or at a pace by the processes of one gateway, which writes them to HTTP clients; over ZeroMQ, or over a
nats-server. Each cell is a system of real processes that know all processors. As it is it fits the machine: with 16
cores or more it has up to 8 workers, 4 processors and 4 readers.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.machine import Placement, description
from benchmarks.outputs import Record, declare_outputs, paint, progress, write_outputs
from benchmarks.scaling.document import BUSY, page, tables
from benchmarks.scaling.model import PLACES, fitted, predicted
from benchmarks.scaling.system import CLIENTS, GATEWAY, NATS, ROWS, ZEROMQ, Sample, Shape, Way, sample
from tokenbus_contracts import Limits, encode
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_engines.synthetic import SyntheticEngine
from tokenbus_services.worker.assembler import StepAssembler

_TOP_K = 20
_WANTED = 1.8
"""What twice as many processors are to carry, times what half of them do, where they are what limits."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round of two shapes: whether it works")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how many rounds (3)")
    parser.add_argument("--seconds", type=float, default=4.0, metavar="S", help="how long each is measured (4)")
    parser.add_argument("--k", type=_top_k, default=0, metavar="K", help="alternatives of each token, or none (0)")
    parser.add_argument(
        "--shapes", type=_shapes, metavar="W/P/R,...",
        help="workers, processors and readers of each system (as many as the cores are good for)",
    )  # fmt: skip
    parser.add_argument(
        "--bus", choices=(ZEROMQ, NATS), nargs="+", default=[ZEROMQ, NATS], help="what the messages pass through (both)"
    )
    parser.add_argument(
        "--reading", choices=(CLIENTS, GATEWAY), nargs="+", default=[CLIENTS, GATEWAY],
        help="who reads: clients, or the processes of a gateway with clients of its own (both)",
    )  # fmt: skip
    parser.add_argument(
        "--pace", type=int, default=40, metavar="N", help="steps/s of each worker that a gateway reads (40)"
    )
    parser.add_argument(
        *("--record",), type=Path, nargs="+", metavar="FILE", help="measure nothing, take the runs of earlier ones"
    )
    declare_outputs(parser, "scaling", has_plot=True)
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.seconds, options.shapes = 1, 1.0, [Shape(1, 1, 1), Shape(2, 2, 1)]
        options.pace = min(options.pace, 5)
    if options.record:
        records = [json.loads(path.read_text()) for path in options.record]
        record: Record = records[0] | {"runs": [run for each in records for run in each["runs"]]}
    else:
        try:
            record = _measured(options.shapes or _shapes_for(os.cpu_count() or 1), options)
        except (NotRunError, WrongDeliveryError) as error:
            parser.exit(2, f"{parser.prog}: {error}\n")
    print("\n".join(tables(record, paint())))
    if options.plot or options.write_docs:
        from benchmarks.scaling.plot import plot  # noqa: PLC0415 - where it is measured, matplotlib need not be

        write_outputs(options, "scaling", record, lambda: page(record), plot)
    else:
        write_outputs(options, "scaling", record, lambda: "")


def _measured(shapes: Sequence[Shape], options: argparse.Namespace) -> Record:
    paces = {CLIENTS: 0, GATEWAY: options.pace}
    ways = [Way(bus, reading, paces[reading]) for bus in options.bus for reading in options.reading]
    return {
        "benchmark": "scaling",
        "rows": ROWS,
        "tokens_a_step": _step(0)[0],
        "bytes_a_token": {str(k).lower(): round(_step(k)[1], 1) for k in (None, 0, 5, _TOP_K)},
        "runs": [_run(way, shapes, options) for way in ways],
    }


def _run(way: Way, shapes: Sequence[Shape], options: argparse.Namespace) -> Record:
    found: dict[Shape, list[Sample]] = {shape: [] for shape in shapes}
    reason = NotRunError("nothing to measure")
    for number in range(options.rounds):
        for shape in shapes if number % 2 == 0 else reversed(shapes):
            progress(f"{way.bus}, {way.reading}, round {number + 1} of {options.rounds}: {shape.in_words}")
            try:
                with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as folder:
                    found[shape].append(sample(way, shape, options.k, options.seconds, Path(folder)))
            except NotRunError as error:  # one that is overloaded is left out, and the others are measured
                reason = error
                progress(f"  {error}")
    found = {shape: taken for shape, taken in found.items() if len(taken) == options.rounds}
    if not found:
        raise reason
    cores = os.cpu_count() or 1
    cells = [_cell(shape, taken) for shape, taken in found.items()]
    costs = fitted(cells)
    for cell in cells:
        counts = {kind: cell[f"{kind}s"] for kind in PLACES}
        if way.reading == GATEWAY:
            counts["load"] = counts["worker"]
        steps, limit = predicted(costs, counts, cores)
        if way.pace and steps > way.pace * cell["workers"]:
            steps, limit = way.pace * cell["workers"], "pace"
        cell["predicted"], cell["limit"] = round(steps, 1), limit
    return {
        "machine": description(Placement.here(), vllm=False) | {"pinned": "no"},
        "bus": way.bus,
        "reading": way.reading,
        "pace": way.pace,
        "k": "none" if options.k is None else options.k,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "model": {kind: [round(each, 1) for each in cost] for kind, cost in costs.items()},
        "cells": cells,
        "goals": list(_goals(found)),
    }


def _cell(shape: Shape, taken: Sequence[Sample]) -> Record:
    return {
        "workers": shape.workers,
        "processors": shape.processors,
        "readers": shape.readers,
        "steps_per_second": round(median(each.steps for each in taken), 1),
        "microseconds_a_step": _medians([each.costs for each in taken], 1),
        "busiest": _medians([each.busiest for each in taken], 3),
        "rounds": [round(each.steps, 1) for each in taken],
    }


def _medians(taken: Sequence[dict[str, float]], digits: int) -> dict[str, float]:
    return {kind: round(median(each[kind] for each in taken), digits) for kind in taken[0]}


def _step(top_k: int | None) -> tuple[int, float]:
    """Return how many tokens a step of the synthetic engine has, and how many bytes each of them is in a message."""
    engine = SyntheticEngine()
    for key in range(1, ROWS + 1):
        generate = Generate(request_key=key)
        if top_k is not None:
            generate.top_logprobs = top_k
        engine.admit(generate)
    (batch,) = StepAssembler(Limits.default(), engine.vocabulary_size).assemble(engine.step()[0])
    header = batch.header._replace(worker_id="w0", epoch=1, sequence=1)
    return batch.token_ids.size, len(encode(batch.headed(header))) / batch.token_ids.size


def _goals(found: dict[Shape, list[Sample]]) -> Iterator[Record]:
    """Yield what twice the processors carry beside half of them, where those are what limits."""
    for shape, taken in found.items():
        twice = Shape(shape.workers, 2 * shape.processors, shape.readers)
        if twice not in found or median(each.busiest["processor"] for each in taken) < BUSY:
            continue
        measured = median(late.steps / early.steps for early, late in zip(taken, found[twice], strict=True))
        yield {
            "goal": f"{twice.processors} processors, times {shape.processors}: "
            f"{twice.workers} workers, {twice.readers} readers",
            "wanted": f"at least {_WANTED}",
            "measured": round(measured, 2),
            "met": measured >= _WANTED,
        }


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
    return small + [shape for shape in larger if cores >= shape.workers + shape.processors + shape.readers]


def _shapes(text: str) -> list[Shape]:
    found = []
    for each in text.split(","):
        counts = [int(part) for part in each.split("/") if part.isdecimal()]
        if len(counts) != len(PLACES) or not all(counts) or counts[0] * ROWS % counts[2]:
            raise argparse.ArgumentTypeError(f"workers/processors/readers, each at least 1, got {each!r}")
        found.append(Shape(*counts))
    return found


def _top_k(text: str) -> int | None:
    if text != "none" and not (text.isdecimal() and int(text) <= _TOP_K):
        raise argparse.ArgumentTypeError(f"none, or 0 to {_TOP_K}, got {text!r}")
    return None if text == "none" else int(text)


if __name__ == "__main__":
    main()
