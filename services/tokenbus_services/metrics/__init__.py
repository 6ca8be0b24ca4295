"""Metrics and health of a processor and a worker, over HTTP."""

from tokenbus_services.metrics.processor import serve_processor
from tokenbus_services.metrics.publisher import serve_publisher
from tokenbus_services.metrics.server import MetricsServer

__all__ = [
    "MetricsServer",
    "serve_processor",
    "serve_publisher",
]
