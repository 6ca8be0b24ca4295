"""Serve the metrics of a processor or a publisher inside a `with` block."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

from tokenbus_services.metrics.families import FamilyCollector
from tokenbus_services.metrics.health import LoopWatch, processor_health, publisher_health
from tokenbus_services.metrics.processor import PROCESSOR
from tokenbus_services.metrics.publisher import PUBLISHER, PublisherView
from tokenbus_services.metrics.server import MetricsServer
from tokenbus_services.metrics.view import ProcessorView, StepTimes
from tokenbus_services.processor import Processor
from tokenbus_services.worker import Publisher


def processor_collector(processor: Processor, times: StepTimes, watch: LoopWatch) -> FamilyCollector[ProcessorView]:
    """Return the collector of a processor, the times of its steps, and the watch of its loop."""
    return FamilyCollector("processor", PROCESSOR, lambda: ProcessorView(processor, times, watch))


def publisher_collector(publisher: Publisher, watch: LoopWatch) -> FamilyCollector[PublisherView]:
    """Return the collector of a publisher, and of the watch of its event loop."""
    return FamilyCollector("worker", PUBLISHER, lambda: PublisherView(publisher, watch))


@contextlib.asynccontextmanager
async def serve_processor(processor: Processor) -> AsyncIterator[MetricsServer]:
    """Serve a processor's metrics at `metrics.address`, or nowhere if that is empty.

    To be called on the processor's event loop, before it listens or after. Raises an AddressError if the address
    cannot be used.
    """
    loop = asyncio.get_running_loop()
    times = StepTimes(processor.clock.now)
    watch = LoopWatch(lambda: loop, time.monotonic)
    server = MetricsServer(
        "metrics.address",
        processor.settings.metrics.address,
        processor_collector(processor, times, watch),
        lambda: processor_health(processor, watch),
        watch,
    )
    observers = processor.intake.step_observers
    async with server.running():
        if server.address:
            observers.append(times.observe)
        try:
            yield server
        finally:
            if server.address:
                observers.remove(times.observe)


@contextlib.contextmanager
def serve_publisher(publisher: Publisher) -> Iterator[MetricsServer]:
    """Serve a publisher's metrics at `worker.metrics_address`, or nowhere if that is empty.

    From any thread, before the publisher starts or after. Raises an AddressError if the address cannot be used.
    """
    watch = LoopWatch(lambda: publisher.link.loop, time.monotonic)
    server = MetricsServer(
        "worker.metrics_address",
        publisher.settings.worker.metrics_address,
        publisher_collector(publisher, watch),
        lambda: publisher_health(publisher, watch),
        watch,
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()
