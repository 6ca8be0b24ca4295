"""Metrics and health of a processor and a worker, over HTTP."""

from tokenbus_services.metrics.serve import serve_processor, serve_publisher
from tokenbus_services.metrics.server import MetricsServer

__all__ = [
    "MetricsServer",
    "serve_processor",
    "serve_publisher",
]
