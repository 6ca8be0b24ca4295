"""Logs: JSON lines for machines, lines for people, and nothing from outside that breaks either."""

from tokenbus_services.logs.deduplicated import DeduplicatedLog
from tokenbus_services.logs.output import configure, logger

__all__ = ["DeduplicatedLog", "configure", "logger"]
