"""Prometheus collectors of a processor, of a publisher, and of the process around them."""

import time
from collections.abc import Callable, Iterator
from importlib.metadata import version

from prometheus_client import ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tokenbus_services.metrics.families import collect
from tokenbus_services.metrics.health import LoopWatch
from tokenbus_services.metrics.peers import PEERS, SPECULATION
from tokenbus_services.metrics.publisher import PUBLISHER, PublisherView
from tokenbus_services.metrics.requests import REQUESTS, TIMES
from tokenbus_services.metrics.streams import STREAMS
from tokenbus_services.metrics.view import ProcessorView, StepTimes
from tokenbus_services.processor import Processor
from tokenbus_services.worker import Publisher

PROCESSOR = (*STREAMS, *REQUESTS, *TIMES, *PEERS, *SPECULATION)
"""All metrics of a processor."""


class ProcessorCollector(Collector):
    """Reads a processor's plain counters when it is scraped, on the thread that scrapes."""

    def __init__(
        self,
        processor: Processor,
        times: StepTimes,
        watch: LoopWatch,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Take the processor, the times of its steps, the watch of its loop, and the time of day in seconds."""
        self._processor = processor
        self._times = times
        self._watch = watch
        self._wall = wall

    def collect(self) -> Iterator[Metric]:
        """Read all metrics, one after the other."""
        view = ProcessorView(self._processor, self._times, self._watch, self._wall)
        yield from collect(PROCESSOR, view)
        yield from of_process("processor")


class PublisherCollector(Collector):
    """Reads a publisher's plain counters when it is scraped, on the thread that scrapes."""

    def __init__(self, publisher: Publisher, watch: LoopWatch) -> None:
        """Take the publisher, and the watch of its event loop."""
        self._view = PublisherView(publisher, watch)

    def collect(self) -> Iterator[Metric]:
        """Read all metrics, one after the other."""
        yield from collect(PUBLISHER, self._view)
        yield from of_process("worker")


def of_process(service: str) -> Iterator[Metric]:
    """Yield the version that runs, and the `process_` metrics that prometheus_client has of every process."""
    build = GaugeMetricFamily(
        "tokenbus_build_info", "Always 1; says which version of Tokenbus runs as what.", labels=("version", "service")
    )
    build.add_metric((version("tokenbus"), service), 1)
    yield build
    yield from ProcessCollector(registry=None).collect()
