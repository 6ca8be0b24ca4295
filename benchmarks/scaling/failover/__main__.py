"""Measure how long requests pause when their processor or NATS server goes: `python -m benchmarks.scaling.failover`.

Two processors, workers and a client that know both, over ZeroMQ: the processor that has requests is killed, asked to
end, or stopped; a pause is from then until every request that it had has its next token at the client. The same over a
cluster of three NATS servers: the one that all of them are connected to is killed (node) or stands still (node-stop),
or the one that leads a durable log with three replicas that the processors keep is killed (leader). A pause is from
then until the client has a token of every request, and a reader of the log an item of every worker, that was produced
after it; of new requests, the longest that one waits for its first token. What went is started again.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.machine import Placement, description
from benchmarks.outputs import Record, declare_outputs, paint, progress, write_outputs
from benchmarks.scaling.failover import nodes, processors
from benchmarks.scaling.failover.document import page, tables

_WAYS = (*processors.SIGNALS, nodes.BUS, nodes.STILL, nodes.LEADER)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling.failover", description=__doc__)
    parser.add_argument("--how", choices=_WAYS, nargs="+", default=list(_WAYS), help="what goes, and how (all)")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="how often (9)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="how many workers (2)")
    parser.add_argument("--requests", type=int, default=8, metavar="N", help="how many requests (8)")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes beside it that only compute (0)")
    parser.add_argument(
        *("--record",), type=Path, nargs="+", metavar="FILE", help="measure nothing, take the runs of earlier ones"
    )
    declare_outputs(parser, "failover", has_plot=False)
    options = parser.parse_args(arguments)
    if options.record:
        runs = [run for path in options.record for run in json.loads(path.read_text())["runs"]]
    else:
        try:
            runs = [_measured(options)]
        except (NotRunError, WrongDeliveryError) as error:
            parser.exit(2, f"{parser.prog}: {error}\n")
    record: Record = {"benchmark": "failover", "runs": runs}
    print("\n".join(tables(record, paint())))
    write_outputs(options, "failover", record, lambda: page(record))


def _measured(options: argparse.Namespace) -> Record:
    ways = []
    with _busy(options.busy):
        for how in options.how:
            progress(f"{how}: {options.rounds} rounds")
            if how in processors.SIGNALS:
                pauses = processors.pauses(how, options.rounds, options.workers, options.requests)
                found = {nodes.CLIENT: asyncio.run(pauses)}
            else:
                found = asyncio.run(nodes.pauses(how, options.rounds, options.workers, options.requests))
            for name, seconds in found.items():
                ways.append({"how": how, "seen_by": name, "seconds": [round(each, 3) for each in seconds]})
    machine = description(Placement.here(), vllm=False) | {"pinned": "no"}
    given = {"workers": options.workers, "requests": options.requests, "busy": options.busy}
    return {"machine": machine, **given, "ways": ways}


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Let so many processes compute for as long as this lasts."""
    with ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


if __name__ == "__main__":
    main()
