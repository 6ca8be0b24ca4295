"""Measure the bus beside its peers: `python -m benchmarks.bus`."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.bus import trace
from benchmarks.bus.document import page
from benchmarks.bus.lanes import KEYS, NATS
from benchmarks.bus.pair import Pair
from benchmarks.bus.plan import Plan, beside, quick
from benchmarks.bus.plot import plot
from benchmarks.bus.record import run
from benchmarks.bus.tables import render
from benchmarks.outputs import declare_outputs, paint, progress, write_json, write_outputs

_COMMAND = "python -m benchmarks.bus"
_LEAST_MEMORY_STEPS = 100
_EXAMPLES = """\
examples:
  python -m benchmarks.bus --quick                    whether it works, in a minute
  python -m benchmarks.bus                            the tables, in a quarter of an hour
  python -m benchmarks.bus --keys                     what CURVE costs, in two minutes
  python -m benchmarks.bus --nats                     what NATS costs, in two minutes
  python -m benchmarks.bus --trace                    each hop of a step, and what slow steps have in common
  python -m benchmarks.bus --memory-steps 1000000 --write-docs
                                                      what docs/benchmarks/bus.md shows, on a quiet machine

A worker process and a processor process, each on a core of its own, carry the same steps in turn for each peer.
The goals are at the top of what is printed: p50 and p99 at 200 steps/s, steps/s flat out, the cost of a row with
many requests open, and memory over a million steps. Ratios to the peers hold on any machine; times are this one's.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write what was asked for."""
    parser = argparse.ArgumentParser(
        prog=_COMMAND,
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    full = Plan()
    parser.add_argument("--quick", action="store_true", help="short turns over ipc at k = 0, the ends of each scale")
    parser.add_argument("--keys", action="store_true", help="only what keys cost: tcp without and with them")
    parser.add_argument("--nats", action="store_true", help="only what NATS costs: tcp without and with it")
    parser.add_argument("--trace", action="store_true", help="only where a step's time goes at a rate, hop by hop")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"turns of each peer (default {full.rounds})")
    parser.add_argument("--seconds", type=float, metavar="S", help=f"of a turn flat out (default {full.seconds:g})")
    parser.add_argument(
        *("--latency-steps",), type=int, metavar="N", help=f"of a turn at a rate (default {full.latency_steps})"
    )
    parser.add_argument(
        *("--memory-steps",), type=int, metavar="N", help=f"steps of the memory run (default {full.memory_steps})"
    )
    parser.add_argument("--seed", type=int, default=full.seed, help=f"of the random steps (default {full.seed})")
    declare_outputs(parser, "bus", has_plot=True)
    options = parser.parse_args(arguments)
    plan = _plan(parser, options)
    if options.trace:
        if options.write_docs or options.plot:
            parser.error("--trace: it prints its tables, and writes them with --json alone")
        with Pair() as pair:
            traced = trace.run(pair, plan, progress)
        print(trace.render(traced, paint()))
        if options.json:
            write_json(traced, options.json)
        return
    record = run(plan, progress)
    print(render(record, paint()))
    command = shlex.join([*_COMMAND.split(), *(sys.argv[1:] if arguments is None else arguments)])
    write_outputs(options, "bus", record, lambda: page(record, command), plot)


def _plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Plan:
    lane = KEYS if options.keys else NATS if options.nats else ""
    base = quick() if options.quick else beside(lane) if lane else Plan()
    for name, least in (("rounds", 1), ("seconds", 0.1), ("latency_steps", 20), ("memory_steps", _LEAST_MEMORY_STEPS)):
        value = getattr(options, name)
        if value is not None:
            if value < least:
                parser.error(f"--{name.replace('_', '-')}: at least {least}, not {value}")
            base = replace(base, **{name: value})
    return replace(base, seed=options.seed)


if __name__ == "__main__":
    main()
