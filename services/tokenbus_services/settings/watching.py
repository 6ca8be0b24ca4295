"""Sections of the settings that say what is kept and shown for people; as in `sections`."""

from dataclasses import dataclass
from typing import Literal

from tokenbus_services.settings.kinds import (
    Choice,
    HostAndPort,
    Kind,
    Text,
    Whole,
    check,
    count,
    milliseconds,
    setting,
    size,
)


@dataclass(frozen=True, slots=True)
class DeadLetterSettings:
    """Where messages go that were refused, for people to look at."""

    directory: str = setting("dead-letters", Text(1, 4096, "the folder they are kept in"))
    max_files: int = setting(
        1000, count("files", "the most messages, each with a note beside it that does not count; the oldest go first")
    )
    max_bytes: int = setting(268_435_456, size("the most of all files together, notes too; the oldest go first"))
    per_second: int = setting(
        50, count("files", "the most messages that are written in a second; others are only counted", high=1000)
    )

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check(self, "dead_letters")


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """How a process is watched from outside."""

    address: str = setting(
        "127.0.0.1:9470", HostAndPort("where the processor serves its metrics; port 0: any free one; empty: nowhere")
    )
    stall_timeout_ms: int = setting(
        5000, milliseconds("after how long an event loop that does not answer makes its process unhealthy")
    )

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check(self, "metrics")


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
        check(self, "log")


LIMIT_MEANINGS = {
    "max_message_bytes": ("bytes", "the largest encoded batch"),
    "max_rows": ("rows", "the most of a batch"),
    "max_tokens_per_row": ("tokens", "the most of a row"),
    "max_draft_tokens_per_row": ("tokens", "the most draft tokens verified, and the most proposals, of a row"),
    "max_top_k": ("alternatives", "the most of a token"),
    "max_token_id": ("", "the largest token id"),
}


def limit_kind(name: str, most: int) -> Kind:
    """Return what one of the contract's limits may be set to, up to the schema's own."""
    unit, meaning = LIMIT_MEANINGS[name]
    return Whole(0, most, unit, meaning)
