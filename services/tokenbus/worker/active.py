"""ActiveRequests: those that an engine has, with their deadlines."""

import math
import threading
from collections.abc import Collection

from tokenbus_contracts.generated.request_pb2 import Generate


class ActiveRequests:
    """Keeps a request from its admission to its last row. Any thread may use it.

    `WorkerSession.requests` has more: those too that wait for the engine, as a processor that reconciles must know.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deadlines: dict[int, float] = {}
        """By request id, in milliseconds since 1970-01-01 UTC; infinity: no deadline."""
        self._earliest = math.inf
        """A lower bound of the deadlines: the request that had it may have ended."""

    def add(self, generate: Generate) -> None:
        """Add a request that the engine admitted."""
        with self._lock:
            deadline = generate.deadline_unix_ms or math.inf
            self._deadlines[generate.request_id] = deadline
            self._earliest = min(self._earliest, deadline)

    def end(self, keys: Collection[int]) -> list[int]:
        """Remove requests, and return those that were active."""
        with self._lock:
            return [key for key in keys if self._deadlines.pop(key, None) is not None]

    @property
    def keys(self) -> list[int]:
        """Their ids."""
        with self._lock:
            return sorted(self._deadlines)

    def end_all(self) -> list[int]:
        """Remove all requests, and return their ids."""
        return self.end(self.keys)

    def end_overdue(self, unix_ms: int) -> list[int]:
        """Remove the requests whose deadline has passed, and return their ids; one comparison where none can have."""
        if unix_ms < self._earliest:
            return []
        with self._lock:
            overdue = [key for key, deadline in self._deadlines.items() if deadline <= unix_ms]
            for key in overdue:
                del self._deadlines[key]
            self._earliest = min(self._deadlines.values(), default=math.inf)
        return overdue
