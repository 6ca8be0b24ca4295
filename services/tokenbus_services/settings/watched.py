"""The sections of what people look at: dead letters, metrics and logs."""

from dataclasses import dataclass
from typing import Literal

from tokenbus_services.settings.fields import check as _check
from tokenbus_services.settings.fields import count as _count
from tokenbus_services.settings.fields import size as _size
from tokenbus_services.settings.fields import time as _time
from tokenbus_services.settings.kinds import Choice, HostAndPort, Text, setting


@dataclass(frozen=True, slots=True)
class DeadLetterSettings:
    """Where messages go that were refused, for people to look at."""

    directory: str = setting("dead-letters", Text(1, 4096, "the folder they are kept in"))
    max_files: int = setting(
        1000, _count("files", "the most messages, each with a note beside it that does not count; the oldest go first")
    )
    max_bytes: int = setting(268_435_456, _size("the most of all files together, notes too; the oldest go first"))
    per_second: int = setting(
        50, _count("files", "the most messages that are written in a second; others are only counted", high=1000)
    )

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        _check(self, "dead_letters")


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """How a process is watched from outside."""

    address: str = setting(
        "127.0.0.1:9470", HostAndPort("where the processor serves its metrics; port 0: any free one; empty: nowhere")
    )
    stall_timeout_ms: int = setting(
        5000, _time("after how long an event loop that does not answer makes its process unhealthy")
    )

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        _check(self, "metrics")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """How and what is logged."""

    format: Literal["auto", "json", "console"] = setting(
        "auto",
        Choice(("auto", "json", "console"), "JSON lines, lines for people, or whichever suits where they are written"),
    )
    level: Literal["debug", "info", "warning", "error"] = setting(
        "info", Choice(("debug", "info", "warning", "error"), "the least that is logged")
    )

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        _check(self, "log")
