"""Measure the durable log beside bare nats-py, and its readers' cost: `python -m benchmarks.durable_log`.

Real nats-server processes on this machine. In turn, one process writes messages of random bytes to a JetStream stream
by nats-py alone, and items of as many bytes to a durable log; and items while one, two and four processes read them.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.durable_log.beside_bare import beside_bare
from benchmarks.durable_log.document import page, tables
from benchmarks.durable_log.readers import cost_of_readers, goals
from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.machine import Placement, description
from benchmarks.nats_servers import nats_servers
from benchmarks.outputs import Record, declare_outputs, paint, write_outputs
from tokenbus_services.durable_log.stream import LogError

_REPLICAS = (3, 1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.durable_log", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round: whether it works")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each (5)")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="how long a turn takes (1)")
    parser.add_argument("--size", type=int, default=20_000, metavar="BYTES", help="of a message or an item (20,000)")
    parser.add_argument("--pace", type=int, default=300, metavar="N", help="items a second where it is not full (300)")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="measure nothing, take the figures of an earlier run"
    )
    declare_outputs(parser, "durable-log", has_plot=False)
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.seconds = 1, 0.3
    if options.record:
        record: Record = json.loads(options.record.read_text())
    else:
        try:
            record = {"benchmark": "durable_log", **_measured(options)}
        except (NotRunError, WrongDeliveryError, LogError) as error:
            parser.exit(2, f"{parser.prog}: {error}\n")
    print("\n".join(tables(record, paint())))
    write_outputs(options, "durable-log", record, lambda: page(record))


def _measured(options: argparse.Namespace) -> Record:
    given = options.rounds, options.seconds, options.size
    figures: list[Record] = []
    found: Record = {}
    for replicas in _REPLICAS:
        with (
            tempfile.TemporaryDirectory(prefix="tb-log-") as folder,
            nats_servers(Path(folder), replicas) as servers,
        ):
            if not found:
                found = asyncio.run(beside_bare(servers, *given))
            figures += asyncio.run(cost_of_readers(servers, *given, paces=(options.pace, 0)))
    return {
        "machine": description(Placement.here(), vllm=False) | {"pinned": "no"},
        "rounds": options.rounds,
        "seconds": options.seconds,
        "size": options.size,
        **found,
        "readers": figures,
        "goals": [*found["goals"], *goals(figures)],
    }


if __name__ == "__main__":
    main()
