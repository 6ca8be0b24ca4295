"""Measure the bus beside its peers: `python -m benchmarks.bus`.

A worker process and a processor process, each on a core of its own, carry the same steps of 256 rows x 3 tokens in turn
for each peer, in an order drawn anew for every round: at a rate, of which the first tenth does not count, and flat out,
of which the middle three fifths count. Ratios to the peers hold on any machine; times are this one's.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from benchmarks.bus.pair import Pair
from benchmarks.bus.turns import IPC, LANES, OURS, STRUCT, TCP, Turns, Way, cost, measure, percentiles, rate
from benchmarks.codec.fastdeploy import STRUCT_BYTES
from benchmarks.errors import NotRunError
from benchmarks.report import Report, Row
from benchmarks.sysv import queue_for

_LABELS = {lane.label: lane for lane in LANES}


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("bus", __doc__)
    add = report.parser.add_argument
    add("--beside", choices=list(_LABELS)[1:], nargs="+", default=list(_LABELS)[1:], help="which peers (all)")
    add("--rounds", type=int, default=3, metavar="N", help="turns of each peer (3)")
    add("--seconds", type=float, default=2.0, metavar="S", help="of a turn flat out (2)")
    add("--latency-steps", type=int, default=1000, metavar="N", help="of a turn at a rate (1000)")
    add("--seed", type=int, default=1, help="of the random steps (1)")
    options = report.parse(arguments)
    if options.quick:
        options.rounds, options.seconds, options.latency_steps = 1, 0.3, 60
    lanes = [OURS, *(_LABELS[label] for label in options.beside)]
    top_ks = (0,) if options.quick else (0, 20)
    with ExitStack() as stack:
        queue = 0
        if STRUCT in lanes:
            try:  # before the processes: they are to be in the namespace that the queue is in
                queue = stack.enter_context(queue_for(STRUCT_BYTES - np.dtype("i8").itemsize)).identity
            except NotRunError as error:
                report.say(f"FastDeploy's struct: {error}.")
                lanes.remove(STRUCT)
        pair = stack.enter_context(Pair())
        transports = (IPC,) if options.quick else (IPC, TCP)
        chosen = [
            (lane, transport)
            for lane in lanes
            for transport in ([each for each in lane.transports if each in transports] or lane.transports[:1])
        ]
        times = options.rounds, options.latency_steps, options.seconds
        turns = measure(pair, chosen, top_ks, *times, queue, options.seed)
        for top_k in top_ks:
            report.table([_row(way, turns) for way in turns if way.case.top_k == top_k], f"k = {top_k}")
    report.write()


def _row(way: Way, turns: Mapping[Way, Turns]) -> Row:
    """Return how late a way's steps were at a rate, and how many went flat out, beside ours."""
    lane, transport, case = way
    # A peer with one transport, which Tokenbus did not go here, is compared with Tokenbus's first.
    first = next(iter(turns)).transport
    ours = turns.get(Way(OURS, transport, case)) or turns[Way(OURS, first, case)]
    late, steps = percentiles(turns[way].at_rate), rate(turns[way].flat_out)
    return {
        "": lane.label,
        "over": transport,
        "p50 us": late[50],
        "p99 us": late[99],
        "p50, of ours": late[50] / percentiles(ours.at_rate)[50],
        "steps/s": steps,
        "of ours": steps / rate(ours.flat_out),
        "to send, us": cost(turns[way].flat_out, 0),
        "to receive, us": cost(turns[way].flat_out, 1),
    }


if __name__ == "__main__":
    main()
