"""Logs: JSON lines for machines, lines for people, and nothing from outside that breaks either."""

from tokenbus.logs.deduplicated import DeduplicatedLog
from tokenbus.logs.output import configure, logger

__all__ = ["DeduplicatedLog", "configure", "logger"]
