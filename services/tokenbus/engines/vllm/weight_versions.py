"""Weight versions, which vLLM's core sets only after the scheduler has returned a step."""

from functools import cache, wraps
from typing import Any

from tokenbus.logs import logger

_MOST = 2**64 - 1
_MOST_DIGITS = 20
_log = logger("worker")


@cache  # a second call must not wrap the method again
def follow_weight_versions(core: type) -> None:
    """Make vLLM's core pass each new weight version to the scheduler, if the scheduler has `note_weight_version`."""
    # Before release 0.29, vLLM has no weight versions.
    own: Any = getattr(core, "set_weight_version", None)
    if own is None:
        return

    @wraps(own)
    def set_weight_version(self: Any, weight_version: str) -> None:  # noqa: ANN401 - vLLM's EngineCore
        own(self, weight_version)
        if note := getattr(self.scheduler, "note_weight_version", None):
            note(weight_version)

    core.set_weight_version = set_weight_version  # type: ignore[attr-defined]


def version_number(name: object) -> int:
    """Return vLLM's name of a weight version as a number, or 0 if the name is not a number."""
    if isinstance(name, str) and name.isascii() and name.isdecimal() and len(name) <= _MOST_DIGITS:
        number = int(name)
        if number <= _MOST:
            return number
    _log.warning("weight version refused", field="weight_version", limit=f"a number up to {_MOST}", value=ascii(name))
    return 0
