"""News: something that happened to a service, for whoever started it to tell."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_OF_EVERY_LINE = ("timestamp", "level", "event", "logger", "exception")


@dataclass(frozen=True, slots=True)
class News:
    """What happened to which service, in words and as values."""

    service: str
    event: str
    """started, ready, log or ended."""
    text: str
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_bad(self) -> bool:
        """Whether somebody should look."""
        return self.event == "ended" or self.values.get("level") in ("error", "critical")


def logged(service: str, line: Mapping[str, Any]) -> News:
    """Return the news of a line that a service logged."""
    facts = ", ".join(f"{name} {_short(value)}" for name, value in line.items() if name not in _OF_EVERY_LINE)
    text = f"{line.get('event', '')}" + (f": {facts}" if facts else "")
    if exception := str(line.get("exception", "")):
        text += f": {exception.strip().splitlines()[-1]}"
    return News(service, "log", text, line)


def _short(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
