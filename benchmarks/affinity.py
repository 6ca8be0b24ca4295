"""Measure how few clients' requests a worker has, and how even their load is: `python -m benchmarks.affinity`.

A processor's own dispatch, without sockets: so many requests are always open, and when a random one ends, a random
client asks for the next. What is seen is the second half of that. "Worst" is the busiest worker, of the least busy one.
"""

import random
from collections.abc import Iterator, Sequence
from statistics import fmean

import numpy as np

from benchmarks.report import Report, Row, progress
from tests.services.bench import Bench
from tests.services.builders import generate_of
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import RequestError
from tokenbus_services.processor.requests import Request

_CASES = ((8, 2, 256), (8, 4, 256), (8, 8, 256), (4, 8, 256), (16, 8, 128), (8, 8, 16))
_EVERY = 101
Seen = tuple[float, float, float]


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("affinity", __doc__)
    report.parser.add_argument("--lives", type=int, default=20, metavar="N", help="how often each place is used (20)")
    options = report.parse(arguments)
    cases = ((2, 2, 16),) if options.quick else _CASES
    report.table([_row(*case, options.lives) for case in cases])
    report.write()


def _row(clients: int, workers: int, requests: int, lives: int) -> Row:
    progress(f"{clients} clients, {workers} workers, {requests} requests for each")
    readers, busiest, worst = zip(*_seen(clients, workers, requests, lives), strict=True)
    return {
        "clients": clients,
        "workers": workers,
        "requests a worker": requests,
        "clients in a step": fmean(readers),
        "busiest worker, of the mean": fmean(busiest),
        "worst": max(worst),
    }


def _seen(clients: int, workers: int, requests: int, lives: int) -> Iterator[Seen]:
    """Yield how many clients a step has, and what the busiest worker has of the mean and of the least busy one's."""
    bench, draw, total = Bench(), random.Random(1), workers * requests  # noqa: S311 - no secret
    streams = [bench.worker(f"w{number}", max_requests=4 * requests).known.source.stream for number in range(workers)]
    for number in range(clients):
        bench.client(number + 1)
    routes = [session.route for session in bench.core.clients.sessions.values()]
    registry, table, live = bench.core.registry, bench.core.registry.table, list[Request]()
    for key in range(1, total * lives):
        if len(live) == total:
            place = draw.randrange(total)
            live[place], live[-1] = live[-1], live[place]
            registry.finish(live.pop(), RowStatus.FINISHED_STOP)
        request = bench.core.dispatch.submit(generate_of(key), draw.choice(routes))
        if isinstance(request, RequestError):
            raise TypeError(request.message)
        live.append(request)
        bench.sent.clear()
        if key > total * lives // 2 and key % _EVERY == 0:
            loads = [table.load_of(stream) for stream in streams]
            readers = [np.unique(table.route[table.stream == stream]).size for stream in streams]
            yield fmean(readers), max(loads) / fmean(loads), max(loads) / max(1, min(loads))


if __name__ == "__main__":
    main()
