"""Logs: JSON lines for machines, lines for people, and nothing from outside that breaks either."""

from tokenbus_services.logs.episodes import Episodes
from tokenbus_services.logs.output import configure, logger

__all__ = ["Episodes", "configure", "logger"]
