"""Metrics and health: what a processor and a worker tell of themselves, over HTTP."""

from tokenbus_services.metrics.collectors import ProcessorCollector, PublisherCollector
from tokenbus_services.metrics.errors import MetricsAddressError
from tokenbus_services.metrics.serve import serve_processor, serve_publisher
from tokenbus_services.metrics.server import MetricsServer

__all__ = [
    "MetricsAddressError",
    "MetricsServer",
    "ProcessorCollector",
    "PublisherCollector",
    "serve_processor",
    "serve_publisher",
]
