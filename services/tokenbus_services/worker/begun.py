"""BegunRequests: what the engine has, as far as its steps were published."""

import threading
from collections.abc import Iterable

from tokenbus_contracts.generated.request_pb2 import Generate


class BegunRequests:
    """Knows a request from its admission to its last row; for any thread.

    The session's `requests` are more: those too that wait for the engine. A processor that asks hears of them.
    """

    def __init__(self, *, hands_off: bool) -> None:
        """Keep what was asked for, too, if a decode worker is to be told of it."""
        self._lock = threading.Lock()
        self._keys: set[int] = set()
        self._hands_off = hands_off
        self._asked: dict[int, Generate] = {}

    def begin(self, generate: Generate) -> None:
        """Know a request that the engine took."""
        with self._lock:
            self._keys.add(generate.request_key)
            if self._hands_off:
                self._asked[generate.request_key] = generate

    def leave(self, keys: Iterable[int]) -> None:
        """Know that the engine has handed requests off: what they asked for is still to be told."""
        with self._lock:
            self._keys.difference_update(keys)

    def end(self, keys: Iterable[int]) -> None:
        """Know requests no more."""
        with self._lock:
            self._keys.difference_update(keys)
            for key in keys if self._asked else ():
                self._asked.pop(key, None)

    def end_all(self) -> list[int]:
        """Know no request any more, and return those that were known."""
        with self._lock:
            ended = sorted(self._keys)
            self._keys.clear()
            for key in ended:
                self._asked.pop(key, None)
        return ended

    def take_asked(self, key: int) -> Generate | None:
        """Return what a request that is handed off asked for, once."""
        with self._lock:
            return self._asked.pop(key, None)
