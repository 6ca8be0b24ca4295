"""Measure how long a crowd that connects at once takes, and what it costs a client: `python -m benchmarks.storm`.

A processor with keys over tcp, a worker and a client that asks all the while; then the crowd comes, all at once; then
the processor is killed and started again, and the crowd comes back. The crowd is real clients and workers, all in one
process, so on a machine with few cores that process is a good part of what is measured.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from benchmarks.errors import NotRunError
from benchmarks.machine import Placement, description
from benchmarks.outputs import Record, declare_outputs, progress, write_outputs
from benchmarks.storm.document import page, table
from benchmarks.storm.measure import measure


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storm", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="100 clients and 10 workers: whether it works")
    parser.add_argument("--clients", type=int, default=2000, metavar="N", help="how many clients come (2000)")
    parser.add_argument("--workers", type=int, default=200, metavar="N", help="how many workers come (200)")
    declare_outputs(parser, "storm", has_plot=False)
    options = parser.parse_args(arguments)
    clients, workers = (100, 10) if options.quick else (options.clients, options.workers)
    progress(f"{clients} clients and {workers} workers")
    try:
        found = asyncio.run(measure(clients, workers))
    except NotRunError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    machine = {name: value for name, value in description(Placement.here(), vllm=False).items() if name != "pinned"}
    storms = [each._asdict() for each in found]
    record: Record = {"machine": machine, "clients": clients, "workers": workers, "storms": storms}
    sys.stdout.write(table(record))
    write_outputs(options, "storm", record, lambda: page(record))


if __name__ == "__main__":
    main()
