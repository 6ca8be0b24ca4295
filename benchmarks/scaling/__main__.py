"""Measure how the bus grows with processors, workers and readers: `python -m benchmarks.scaling`.

Workers run a synthetic engine at steps of 256 rows of 3 tokens. They are read by clients that take them as columns,
flat out, or at a pace by the processes of one gateway, which writes them to HTTP clients; over ZeroMQ, or over a
nats-server. Each cell is a system of real processes that know all processors. As it is it fits the machine: with 16
cores or more it has up to 8 workers, 4 processors and 4 readers.
"""

import argparse
import os
from collections.abc import Sequence
from itertools import product
from statistics import median

from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.report import Report, Row, progress
from benchmarks.scaling.system import CLIENTS, GATEWAY, NATS, ROWS, TOKENS_A_ROW, ZEROMQ, Sample, Shape, Way, sample
from tokenbus_contracts import Limits, encode
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_engines.synthetic import SyntheticEngine
from tokenbus_services.worker.assembler import StepAssembler

_TOP_K = 20
_GPUS, _STEPS = 1000, 40
"""On paper: how many GPUs, and steps of each a second."""


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("scaling", __doc__)
    add, buses, readers = report.parser.add_argument, (ZEROMQ, NATS), (CLIENTS, GATEWAY)
    add("--rounds", type=int, default=3, metavar="N", help="how many rounds (3)")
    add("--seconds", type=float, default=4.0, metavar="S", help="how long each is measured (4)")
    add("--k", type=_top_k, default=0, metavar="K", help="alternatives of each token, or none (0)")
    add("--shapes", type=_shapes, metavar="W/P/R,...", help="workers, processors and readers of each system")
    add("--bus", choices=buses, nargs="+", default=buses, help="what the messages pass through (both)")
    add("--reading", choices=readers, nargs="+", default=readers, help="who reads: clients, or a gateway (both)")
    add("--pace", type=int, default=40, metavar="N", help="steps/s of each worker that a gateway reads (40)")
    options = report.parse(arguments)
    if options.quick:
        options.rounds, options.seconds, options.shapes = 1, 0.4, [Shape(1, 1, 1), Shape(2, 2, 1)]
        options.pace = min(options.pace, 5)
    shapes = options.shapes or _shapes_for(os.cpu_count() or 1)
    report.say(f"{options.rounds} round(s) of {options.seconds:g} s in turn, medians, k = {options.k}.")
    try:
        for bus, reading in product(options.bus, options.reading):
            way = Way(bus, reading, options.pace if reading == GATEWAY else 0)
            pace = f" at {way.pace} steps/s a worker" if way.pace else ""
            _report_way(report, f"{bus}, {reading}{pace}", way, shapes, options)
    except (NotRunError, WrongDeliveryError) as error:
        report.fail(error)
    report.table([_on_paper(k) for k in (None, 0, 5, _TOP_K)], f"{_GPUS} GPUs of {_STEPS} steps/s: bytes")
    report.write()


def _report_way(report: Report, name: str, way: Way, shapes: Sequence[Shape], options: argparse.Namespace) -> None:
    """Measure all systems of a way, and print what each carries, and what a step costs its kinds of processes."""
    found = _samples(way, shapes, options)
    rows = [
        shape.counts
        | {"steps/s": median(each.steps for each in taken)}
        | {f"{kind}, us a step": median(each.costs[kind] for each in taken) for kind in taken[0].costs}
        | {f"{kind}, busiest": median(each.busiest[kind] for each in taken) for kind in taken[0].busiest}
        for shape, taken in found.items()
    ]
    report.table(rows, name)


def _samples(way: Way, shapes: Sequence[Shape], options: argparse.Namespace) -> dict[Shape, list[Sample]]:
    found: dict[Shape, list[Sample]] = {shape: [] for shape in shapes}
    reason = NotRunError("nothing to measure")
    for number in range(options.rounds):
        for shape in shapes if number % 2 == 0 else reversed(shapes):
            progress(f"{way.bus}, {way.reading}, round {number + 1} of {options.rounds}: {shape}")
            try:
                found[shape].append(sample(way, shape, options.k, options.seconds))
            except NotRunError as error:  # one that is overloaded is left out, and the others are measured
                reason = error
                progress(f"  {error}")
    found = {shape: taken for shape, taken in found.items() if len(taken) == options.rounds}
    if not found:
        raise reason
    return found


def _on_paper(top_k: int | None) -> Row:
    """Return what many GPUs send, by the alternatives of each token."""
    size = _bytes_a_token(top_k)
    a_second = size * ROWS * TOKENS_A_ROW * _STEPS
    k = "none" if top_k is None else top_k
    return {"k": k, "a token, B": size, "GB/s": _GPUS * a_second / 1e9, "Mbit/s a GPU": a_second * 8 / 1e6}


def _bytes_a_token(top_k: int | None) -> float:
    """Return how many bytes a token of the synthetic engine is in a message."""
    engine = SyntheticEngine()
    for key in range(1, ROWS + 1):
        generate = Generate(request_key=key)
        if top_k is not None:
            generate.top_logprobs = top_k
        engine.admit(generate)
    (batch,) = StepAssembler(Limits.default(), engine.vocabulary_size).assemble(engine.step()[0])
    header = batch.header._replace(worker_id="w0", epoch=1, sequence=1)
    return len(encode(batch.headed(header))) / batch.token_ids.size


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
