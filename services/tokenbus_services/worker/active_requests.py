"""BegunRequests: what the engine has, as far as its steps were published."""

import math
import threading
from collections.abc import Collection, Iterable

from tokenbus_contracts.generated.request_pb2 import Generate


class BegunRequests:
    """Knows a request from its admission to its last row, and the moment at which it ends at the latest; any thread.

    The session's `requests` are more: those too that wait for the engine. A processor that asks hears of them.
    """

    def __init__(self, *, hands_off: bool) -> None:
        """Keep what was asked for, too, if a decode worker is to be given it."""
        self._lock = threading.Lock()
        self._deadlines: dict[int, float] = {}
        """By key, in milliseconds since 1970-01-01 UTC; infinity where none is known."""
        self._earliest = math.inf
        """No request has a deadline before it; one that ended may have had it."""
        self._hands_off = hands_off
        self._asked: dict[int, Generate] = {}

    def begin(self, generate: Generate) -> None:
        """Know a request that the engine took."""
        with self._lock:
            deadline = generate.deadline_unix_ms or math.inf
            self._deadlines[generate.request_key] = deadline
            self._earliest = min(self._earliest, deadline)
            if self._hands_off:
                self._asked[generate.request_key] = generate

    def leave(self, keys: Iterable[int]) -> None:
        """Know that the engine has handed requests off: what they asked for is still to be sent."""
        with self._lock:
            for key in keys:
                self._deadlines.pop(key, None)

    def end(self, keys: Collection[int]) -> list[int]:
        """Know requests no more, and return those that were known."""
        with self._lock:
            for key in keys if self._asked else ():
                self._asked.pop(key, None)
            return [key for key in keys if self._deadlines.pop(key, None) is not None]

    def end_all(self) -> list[int]:
        """Know no request any more, and return those that were known."""
        with self._lock:
            known = sorted(self._deadlines)
        return self.end(known)

    def end_overdue(self, unix_ms: int) -> list[int]:
        """Know no more the requests whose deadline has come, and return them; it looks at them only if one may have."""
        if unix_ms < self._earliest:
            return []
        with self._lock:
            overdue = [key for key, deadline in self._deadlines.items() if deadline <= unix_ms]
            for key in overdue:
                del self._deadlines[key]
                self._asked.pop(key, None)
            self._earliest = min(self._deadlines.values(), default=math.inf)
        return overdue

    def take_asked(self, key: int) -> Generate | None:
        """Return what a request that is handed off asked for, once."""
        with self._lock:
            return self._asked.pop(key, None)
