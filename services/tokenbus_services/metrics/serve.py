"""Serve a processor's metrics, or a publisher's, for as long as a `with` lasts."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

from tokenbus_services.metrics.collectors import ProcessorCollector, PublisherCollector
from tokenbus_services.metrics.health import processor_health, publisher_health
from tokenbus_services.metrics.loop import LoopWatch
from tokenbus_services.metrics.server import MetricsServer
from tokenbus_services.metrics.steps import StepStatistics
from tokenbus_services.processor import Processor
from tokenbus_services.worker import Publisher


@contextlib.asynccontextmanager
async def serve_processor(processor: Processor) -> AsyncIterator[MetricsServer]:
    """Serve a processor's metrics at `metrics.address`, or nowhere if that is empty; begin before it listens or after.

    On the processor's event loop. A MetricsAddressError says why the address cannot be used.
    """
    loop = asyncio.get_running_loop()
    # Twice as many as are here, so that one that comes back goes on from where it was.
    statistics = StepStatistics(2 * processor.settings.processor.max_workers, processor.clock.now)
    watch = LoopWatch(lambda: loop, time.monotonic)
    server = MetricsServer(
        "metrics.address",
        processor.settings.metrics.address,
        ProcessorCollector(processor, statistics, watch),
        lambda: processor_health(processor, watch),
        watch,
    )
    await asyncio.to_thread(server.start)
    observers = processor.intake.step_observers
    if server.address:
        observers.append(statistics.observe)
    try:
        yield server
    finally:
        if server.address:
            observers.remove(statistics.observe)
        await asyncio.to_thread(server.stop)


@contextlib.contextmanager
def serve_publisher(publisher: Publisher) -> Iterator[MetricsServer]:
    """Serve a publisher's metrics at `worker.metrics_address`, or nowhere if that is empty.

    From any thread, before the publisher starts or after. A MetricsAddressError says why the address cannot be used.
    """
    watch = LoopWatch(lambda: publisher.link.loop, time.monotonic)
    server = MetricsServer(
        "worker.metrics_address",
        publisher.settings.worker.metrics_address,
        PublisherCollector(publisher, watch),
        lambda: publisher_health(publisher, watch),
        watch,
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()
