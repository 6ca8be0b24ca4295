"""Repeated events are logged once when they begin and once when they are over."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from tokenbus.logs.values import safe

_MS = 1000
_TOGETHER = object()
"""The key of all keys beyond the most."""


@dataclass(slots=True)
class _Repetition:
    log: Callable[..., object]
    values: dict[str, object]
    first: float
    last: float
    count: int = 1


class DeduplicatedLog:
    """Repeated events, each logged when it first happens to a key, then counted, and summed up when it is over.

    It is over when `end` is called, or after it was quiet for `quiet_ms`, which `expire` notices: call it now and then.
    At most `most` keys are known; events of further keys are counted together, so that a peer that makes up new
    keys cannot fill the log either.
    """

    def __init__(self, *, quiet_ms: int = 10_000, most: int = 1024, now: Callable[[], float] = time.monotonic) -> None:
        self._quiet = quiet_ms / _MS
        self._most = most
        self._now = now
        # The least recently used key stands first.
        self._open: dict[Hashable, dict[str, _Repetition]] = {}

    def __len__(self) -> int:
        return len(self._open) - (_TOGETHER in self._open)

    def begin(self, key: Hashable, log: Callable[..., object], event: str, **values: object) -> bool:
        """Log an event if it is the first of its kind for the key, else count it; return whether it was logged."""
        now = self._now()
        if key not in self._open and len(self) >= self._most:
            self.expire()
            if len(self) >= self._most:
                key, values = _TOGETHER, {**values, "counted_together": True}
        kinds = self._open[key] = self._open.pop(key, {})  # to the end of the order
        known = kinds.get(event)
        if known is not None and not self._is_over(known, now):
            known.last = now
            known.count += 1
            return False
        if known is not None:
            _sum_up(event, known)
        # What is kept until the end must be small: a value may be an error that holds on to all it was raised in.
        kinds[event] = _Repetition(log, {name: safe(name, value) for name, value in values.items()}, now, now)
        log(event, **values)
        return True

    def end(self, key: Hashable) -> None:
        """Sum up the repeated events of a key, if it has any."""
        for event, repetition in self._open.pop(key, {}).items():
            _sum_up(event, repetition, even_one=True)

    def expire(self) -> None:
        """Sum up the events that have been quiet for long enough."""
        now = self._now()
        while self._open:
            key, kinds = next(iter(self._open.items()))
            if not all(self._is_over(repetition, now) for repetition in kinds.values()):
                break
            self._close(key)

    def close(self) -> None:
        """Sum up all repeated events, as at the end of the process."""
        for key in list(self._open):
            self._close(key)

    def _close(self, key: Hashable) -> None:
        for event, repetition in self._open.pop(key).items():
            _sum_up(event, repetition)

    def _is_over(self, repetition: _Repetition, now: float) -> bool:
        return now - repetition.last >= self._quiet


def _sum_up(event: str, repetition: _Repetition, *, even_one: bool = False) -> None:
    if repetition.count > 1 or even_one:
        lasted_ms = round((repetition.last - repetition.first) * _MS)
        repetition.log(f"{event}: over", **repetition.values, count=repetition.count, lasted_ms=lasted_ms)
