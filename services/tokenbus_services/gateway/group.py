"""A gateway of several processes: how they and their supervisor talk, and their metrics and health as one."""

import asyncio
import contextlib
import json
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Self

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from tokenbus_services.gateway.metrics import LOST_PROCESSES
from tokenbus_services.metrics.health import Health

_MOST_BYTES = 2**24
"""Of a line, and of what the other side has not read."""
_MOST = frozenset({
    "tokenbus_build_info",
    "tokenbus_gateway_fill_ratio",
    "tokenbus_gateway_peak_fill_ratio",
    "tokenbus_gateway_unread_files",
})  # fmt: skip
"""Of these the largest of all processes counts."""
_LEAST = frozenset({"process_max_fds", "process_start_time_seconds", "tokenbus_gateway_connected_processors"})
"""Of these the smallest; of all others the sum."""
_GROWING = frozenset({"counter", "histogram"})
_Key = tuple[str, str, tuple[tuple[str, str], ...]]
"""A metric's name, a sample's name, and its labels."""


class Channel:
    """Lines of JSON over one end of a pair of sockets."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send and receive over the streams."""
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> Self:
        """Return a channel over one socket of a pair, which `close` closes."""
        return cls(*await asyncio.open_unix_connection(sock=end, limit=_MOST_BYTES))

    def send(self, **message: object) -> None:
        """Send a message; it is lost if the other side is gone, or has not read the ones before."""
        if not self._writer.is_closing() and self._writer.transport.get_write_buffer_size() < _MOST_BYTES:
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """Yield what the other side sends, until it is gone."""
        with contextlib.suppress(ConnectionError):
            async for line in self._reader:
                yield json.loads(line)

    async def close(self) -> None:
        """Send what waits, and close this end."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


class SummedMetrics(Collector):
    """The metrics of several processes as those of one; what processes counted that have ended still counts."""

    def __init__(self) -> None:
        self._pages: dict[int, list[Metric]] = {}
        self._kinds: dict[str, Metric] = {}
        self._ended: defaultdict[_Key, float] = defaultdict(float)

    def take(self, place: int, page: str) -> None:
        """Take the page of the process in a place, for the last one from there."""
        self._pages[place] = list(text_string_to_metric_families(page))
        for metric in self._pages[place]:
            self._kinds[metric.name] = metric

    def lost(self, place: int) -> None:
        """Count a process that has ended unasked; what it counted, as far as it is known, is kept."""
        growing = [metric for metric in self._pages.pop(place, ()) if metric.type in _GROWING]
        for key, value in _sum([growing]).items():
            self._ended[key] += value
        self._ended[LOST_PROCESSES, f"{LOST_PROCESSES}_total", ()] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        values = _sum(list(self._pages.values()))
        for key, value in self._ended.items():
            values[key] = values.get(key, 0) + value
        made = {name: Metric(name, kind.documentation, kind.type) for name, kind in self._kinds.items()}
        for (metric, sample, labels), value in values.items():
            if metric in made:
                made[metric].add_sample(sample, dict(labels), value)
        yield from made.values()


def _sum(pages: Sequence[Sequence[Metric]]) -> dict[_Key, float]:
    values: dict[_Key, float] = {}
    for metric in (metric for page in pages for metric in page):
        for sample in metric.samples:
            key = (metric.name, sample.name, tuple(sorted(sample.labels.items())))
            before = values.get(key)
            if before is None:
                values[key] = sample.value
            elif metric.name in _MOST:
                values[key] = max(before, sample.value)
            else:
                values[key] = min(before, sample.value) if metric.name in _LEAST else before + sample.value
    return values


def joined_health(healths: Mapping[int, Health], silent_seconds: Mapping[int, float], most_ms: int) -> Health:
    """Return the health of all processes by the last one of each place, which is so many seconds old."""
    problems = [f"process {place}: {problem}" for place, each in healths.items() for problem in each.problems]
    problems += [
        f"process {place}: its event loop has not answered for {seconds:.1f} s"
        for place, seconds in silent_seconds.items()
        if seconds * 1000 > most_ms
    ]
    facts: list[dict[str, Any]] = [each.facts for each in healths.values()]
    if not facts:
        problems.append("none of its processes runs")
    states = {fact["connection"] for fact in facts} - {"open"}
    processors = {name for fact in facts for name in fact["processor"].split(", ") if name}
    return Health(
        tuple(problems),
        {
            "service": "gateway",
            "processes": len(facts),
            "connection": min(states, default="open"),
            "processor": ", ".join(sorted(processors)),
            "open_requests": sum(fact["open_requests"] for fact in facts),
            "is_draining": any(fact["is_draining"] for fact in facts),
        },
    )
