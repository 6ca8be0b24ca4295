"""ActiveRequests: the engine's current requests, with their deadlines."""

import math
import threading
from collections.abc import Collection

from tokenbus_contracts.generated.request_pb2 import Generate


class ActiveRequests:
    """Requests between their admission and their last row. Any thread may use this object.

    `WorkerSession.requests` also has the requests that still wait for the engine.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deadlines: dict[int, float] = {}
        """Deadlines by request id, in milliseconds since 1970-01-01 UTC, or infinity for no deadline."""
        self._earliest = math.inf  # no deadline is earlier than this time

    def add(self, generate: Generate) -> None:
        with self._lock:
            deadline = generate.deadline_unix_ms or math.inf
            self._deadlines[generate.request_id] = deadline
            self._earliest = min(self._earliest, deadline)

    def end(self, request_ids: Collection[int]) -> list[int]:
        """Remove requests, and return the ids that were active."""
        with self._lock:
            return [each for each in request_ids if self._deadlines.pop(each, None) is not None]

    @property
    def request_ids(self) -> list[int]:
        with self._lock:
            return sorted(self._deadlines)

    def end_all(self) -> list[int]:
        return self.end(self.request_ids)

    def end_overdue(self, unix_ms: int) -> list[int]:
        """Remove the requests whose deadlines have passed, and return their ids."""
        if unix_ms < self._earliest:
            return []
        with self._lock:
            overdue = [each for each, deadline in self._deadlines.items() if deadline <= unix_ms]
            for request_id in overdue:
                del self._deadlines[request_id]
            self._earliest = min(self._deadlines.values(), default=math.inf)
        return overdue
