"""Structured logs as JSON or as readable lines. Untrusted values are escaped."""

from tokenbus.logs.deduplicated import DeduplicatedLog
from tokenbus.logs.output import configure, logger

__all__ = ["DeduplicatedLog", "configure", "logger"]
