"""Serve the metrics of a processor or a publisher inside a `with` block."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

from tokenbus_services.metrics.collectors import ProcessorCollector, PublisherCollector
from tokenbus_services.metrics.health import LoopWatch, processor_health, publisher_health
from tokenbus_services.metrics.server import MetricsServer
from tokenbus_services.metrics.view import StepTimes
from tokenbus_services.processor import Processor
from tokenbus_services.worker import Publisher


@contextlib.asynccontextmanager
async def serve_processor(processor: Processor) -> AsyncIterator[MetricsServer]:
    """Serve a processor's metrics at `metrics.address`, or nowhere if that is empty.

    To be called on the processor's event loop, before it listens or after. Raises a MetricsAddressError if the address
    cannot be used.
    """
    loop = asyncio.get_running_loop()
    times = StepTimes(processor.clock.now)
    watch = LoopWatch(lambda: loop, time.monotonic)
    server = MetricsServer(
        "metrics.address",
        processor.settings.metrics.address,
        ProcessorCollector(processor, times, watch),
        lambda: processor_health(processor, watch),
        watch,
    )
    await asyncio.to_thread(server.start)
    observers = processor.intake.step_observers
    if server.address:
        observers.append(times.observe)
    try:
        yield server
    finally:
        if server.address:
            observers.remove(times.observe)
        await asyncio.to_thread(server.stop)


@contextlib.contextmanager
def serve_publisher(publisher: Publisher) -> Iterator[MetricsServer]:
    """Serve a publisher's metrics at `worker.metrics_address`, or nowhere if that is empty.

    From any thread, before the publisher starts or after. Raises a MetricsAddressError if the address cannot be used.
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
