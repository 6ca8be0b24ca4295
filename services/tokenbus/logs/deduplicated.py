"""DeduplicatedLog: logs a repeated event at the beginning and at the end of the repetitions."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from tokenbus.logs.values import safe

_MS = 1000
_TOGETHER = object()
"""Replaces each new key while `most` keys are tracked, so that the events of all new keys are counted together."""


@dataclass(slots=True)
class _Repetition:
    log: Callable[..., object]
    values: dict[str, object]
    first: float
    last: float
    count: int = 1


class DeduplicatedLog:
    """Logs the first event of each key, counts the repetitions, and logs a summary after the last repetition.

    The repetitions end when `end` is called, or after `quiet_ms` without a repetition. The owner must call `expire`
    regularly, because `expire` checks this time. At most `most` keys are tracked. Further keys are counted together, so
    that peers cannot flood the log with new keys.
    """

    def __init__(self, *, quiet_ms: int = 10_000, most: int = 1024, now: Callable[[], float] = time.monotonic) -> None:
        self._quiet = quiet_ms / _MS
        self._most = most
        self._now = now
        # The dict's first key is the least recently used key.
        self._open: dict[Hashable, dict[str, _Repetition]] = {}

    def __len__(self) -> int:
        return len(self._open) - (_TOGETHER in self._open)

    def begin(self, key: Hashable, log: Callable[..., object], event: str, **values: object) -> bool:
        """Log the first event of a kind for a key, or count a repetition. Return whether the event was logged."""
        now = self._now()
        if key not in self._open and len(self) >= self._most:
            self.expire()
            if len(self) >= self._most:
                key, values = _TOGETHER, {**values, "counted_together": True}
        kinds = self._open[key] = self._open.pop(key, {})  # move the key to the end
        known = kinds.get(event)
        if known is not None and not self._is_over(known, now):
            known.last = now
            known.count += 1
            return False
        if known is not None:
            _sum_up(event, known)
        # Keep only short texts for the summary, because an exception would keep its traceback's frames in memory.
        kinds[event] = _Repetition(log, {name: safe(name, value) for name, value in values.items()}, now, now)
        log(event, **values)
        return True

    def end(self, key: Hashable, *, even_one: bool = True) -> None:
        """Log a summary of each event of a key. With `even_one`, include an event that occurred only once."""
        for event, repetition in self._open.pop(key, {}).items():
            _sum_up(event, repetition, even_one=even_one)

    def expire(self) -> None:
        """Log a summary of the repeated events of each key that has been quiet for `quiet_ms`."""
        now = self._now()
        while self._open:
            key, kinds = next(iter(self._open.items()))
            if not all(self._is_over(repetition, now) for repetition in kinds.values()):
                break
            self.end(key, even_one=False)

    def close(self) -> None:
        """Log the summary of all events at the end of the process."""
        for key in list(self._open):
            self.end(key, even_one=False)

    def _is_over(self, repetition: _Repetition, now: float) -> bool:
        return now - repetition.last >= self._quiet


def _sum_up(event: str, repetition: _Repetition, *, even_one: bool = False) -> None:
    if repetition.count > 1 or even_one:
        lasted_ms = round((repetition.last - repetition.first) * _MS)
        repetition.log(f"{event}: over", **repetition.values, count=repetition.count, lasted_ms=lasted_ms)
