"""FairTurns: a few turns at once, which clients get one after the other, however much each of them asks for."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from tokenbus_services.gateway.errors import ApiError

MOST_WAITING = 256


class FairTurns:
    """Gives turns: first in, first out for one client, and one client after the other."""

    def __init__(self, count: int, retry_after_ms: int) -> None:
        """Take how many turns there are at once, and what a client is told that asks for too many."""
        self._free = count
        self._retry_after_ms = retry_after_ms
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """By client; the first one is the next."""

    @property
    def waiting(self) -> int:
        """How many wait for a turn."""
        return sum(not turn.done() for turns in self._waiting.values() for turn in turns)

    @asynccontextmanager
    async def of(self, who: Hashable) -> AsyncIterator[None]:
        """Have a turn of a client for as long as `async with` lasts; raises an ApiError if too many wait."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(who)
        try:
            yield
        finally:
            self._next()

    async def _wait(self, who: Hashable) -> None:
        self._make_room(len(self._waiting.get(who, ())))
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:  # it came at the same time
                self._next()
            raise

    def _make_room(self, own: int) -> None:
        """Refuse a turn where too many wait: the last one of the client that waits for the most."""
        for turns in self._waiting.values():
            while turns and turns[-1].done():
                turns.pop()
        if sum(map(len, self._waiting.values())) < MOST_WAITING:
            return
        error = ApiError(
            429,
            f"texts that wait to be encoded: at most {MOST_WAITING}, got one more",
            code="overloaded",
            retry_after_ms=self._retry_after_ms,
        )
        largest = max(self._waiting.values(), key=len)
        if len(largest) <= own:
            raise error
        largest.pop().set_exception(error)

    def _next(self) -> None:
        while self._waiting:
            who = next(iter(self._waiting))
            turns = self._waiting.pop(who)
            turn = turns.popleft() if turns else None
            if turns:
                self._waiting[who] = turns  # behind all others
            if turn is not None and not turn.done():
                turn.set_result(None)
                return
        self._free += 1
