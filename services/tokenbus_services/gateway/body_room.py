"""BodyRoom: the bytes of all long bodies that come in or wait, bounded, so that no client fills it alone."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Hashable
from types import TracebackType
from typing import Self

from tokenbus_services.gateway.errors import ApiError

SHORT_BYTES = 16_384
"""So much of each body is not counted: connections bound it."""
_BODIES = 8
"""How many of the largest bodies there is room for."""


class BodyRoom:
    """Counts bodies by client. Where they are too many, the newest of the client that holds the most is refused."""

    def __init__(self, largest_body: int, retry_after_ms: int) -> None:
        self.most = _BODIES * largest_body
        self.retry_after_ms = retry_after_ms
        self.size = 0
        """The bytes that are counted."""
        self._held: defaultdict[Hashable, list[HeldBody]] = defaultdict(list)

    def hold(self, who: Hashable) -> "HeldBody":
        """Return a client's next body, which is held for as long as `async with` lasts."""
        return HeldBody(self, who)

    def grow(self, body: "HeldBody", count: int) -> None:
        """Count more bytes of a body."""
        if not body.size:
            self._held[body.who].append(body)
        body.size += count
        self.size += count
        while self.size > self.most:
            largest = max(self._held.values(), key=lambda held: sum(each.size for each in held))
            largest[-1].refuse()

    def free(self, body: "HeldBody") -> None:
        """Count a body no more."""
        if not body.size:
            return
        self.size -= body.size
        body.size = 0
        held = self._held[body.who]
        held.remove(body)
        if not held:
            del self._held[body.who]


class HeldBody:
    """One body, from its first byte until its text is encoded, in one task."""

    def __init__(self, room: BodyRoom, who: Hashable) -> None:
        self.who = who
        self.size = 0
        """The bytes that are counted."""
        self._room = room
        self._task = asyncio.current_task()
        self._is_refused = False

    def grow_to(self, size: int) -> None:
        """Count a body that has `size` bytes by now."""
        more = size - SHORT_BYTES - self.size
        if more > 0 and not self._is_refused:
            self._room.grow(self, more)

    def refuse(self) -> None:
        """Cancel the task: its body is one too many."""
        self._room.free(self)
        self._is_refused = True
        if self._task is not None:
            self._task.cancel()

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """Free the room; raise an ApiError if the body was refused."""
        self._room.free(self)
        if not self._is_refused or self._task is None:
            return
        if kind is None:  # all was done before the cancellation came
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            self._task.uncancel()
        elif kind is asyncio.CancelledError:
            self._task.uncancel()
            message = f"bodies: at most {self._room.most} bytes of all clients at once, got more"
            retry_after_ms = self._room.retry_after_ms
            raise ApiError(429, message, code="overloaded", retry_after_ms=retry_after_ms) from None
