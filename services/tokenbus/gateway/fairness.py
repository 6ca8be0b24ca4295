"""Fairness between clients, which share the event loop's time, the encoders, and the memory for long bodies."""

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar, cast

from tokenbus.gateway.errors import ApiError

T = TypeVar("T")
MOST_WAITING = 256
SHORT_BYTES = 16_384
"""Number of bytes of each body that are not counted, because the limit on connections bounds them."""
_BODIES = 8
_LONG_SECONDS = 0.005
"""If the admitted requests of a tick take longer than this time, in seconds, the next tick admits only one request."""


class FairTurns:
    """Gives turns to clients in rotation, and to the requests of a client in order of arrival."""

    def __init__(self, most: int, retry_after_ms: int) -> None:
        self._free = most
        self._retry_after_ms = retry_after_ms
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    @property
    def waiting(self) -> int:
        return sum(not turn.done() for turns in self._waiting.values() for turn in turns)

    @contextlib.asynccontextmanager
    async def of(self, who: Hashable) -> AsyncIterator[None]:
        """Wait for a turn and hold it during the `async with` block. Raises an ApiError if too many requests wait."""
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
            if not turn.cancelled() and turn.exception() is None:  # the turn was given just before the cancellation
                self._next()
            raise

    def _make_room(self, own: int) -> None:
        """If too many requests wait, refuse the last request of the client with the most waiting requests."""
        for turns in self._waiting.values():
            while turns and turns[-1].done():
                turns.pop()
        if sum(map(len, self._waiting.values())) < MOST_WAITING:
            return
        message = f"texts that wait to be encoded: at most {MOST_WAITING}, got one more"
        error = ApiError(429, message, code="overloaded", retry_after_ms=self._retry_after_ms)
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
                self._waiting[who] = turns  # the client is now last
            if turn is not None and not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class BodyRoom:
    """Bounds the bytes of all bodies. Above the bound, the client with the most bytes loses its newest body."""

    def __init__(self, largest_body: int, retry_after_ms: int) -> None:
        self.most = _BODIES * largest_body
        self.retry_after_ms = retry_after_ms
        self.size = 0
        self._held: defaultdict[Hashable, list[HeldBody]] = defaultdict(list)

    @contextlib.asynccontextmanager
    async def hold(self, who: Hashable) -> AsyncIterator["HeldBody"]:
        """Count a body of a client during the `async with` block. Raises an ApiError if the body is refused."""
        task = cast("asyncio.Task[object]", asyncio.current_task())
        body = HeldBody(self, who, task)
        try:
            yield body
            self._free(body)
            if body.is_refused:  # the block ended before the cancellation arrived
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
                task.uncancel()
        except asyncio.CancelledError:
            if not body.is_refused:
                raise
            task.uncancel()
            message = f"bodies: at most {self.most} bytes of all clients at once, got more"
            raise ApiError(429, message, code="overloaded", retry_after_ms=self.retry_after_ms) from None
        finally:
            self._free(body)

    def grow(self, body: "HeldBody", more: int) -> None:
        if not body.size:
            self._held[body.who].append(body)
        body.size += more
        self.size += more
        while self.size > self.most:
            largest = max(self._held.values(), key=lambda held: sum(each.size for each in held))
            refused = largest[-1]
            self._free(refused)
            refused.is_refused = True
            refused.task.cancel()

    def _free(self, body: "HeldBody") -> None:
        if not body.size:
            return
        self.size -= body.size
        body.size = 0
        held = self._held[body.who]
        held.remove(body)
        if not held:
            del self._held[body.who]


@dataclass(slots=True, eq=False)
class HeldBody:
    """A body that one task receives and encodes."""

    room: BodyRoom
    who: Hashable
    task: "asyncio.Task[object]"
    size: int = 0
    is_refused: bool = False

    def grow_to(self, size: int) -> None:
        more = size - SHORT_BYTES - self.size
        if more > 0 and not self.is_refused:
            self.room.grow(self, more)


class AdmissionLimiter:
    """Admits requests in order: at most `per_tick` per tick of the event loop, or only one after a long tick.

    A burst of new requests therefore does not delay running streams.
    """

    def __init__(self, per_tick: int) -> None:
        self._per_tick = per_tick
        self._left = per_tick
        self._seconds = 0.0
        self._is_counting = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._refill)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def spent(self, seconds: float) -> None:
        self._seconds += seconds

    def _refill(self) -> None:
        self._left = self._per_tick if self._seconds < _LONG_SECONDS else 1
        self._seconds = 0.0
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # otherwise the request was cancelled
                turn.set_result(None)
                self._left -= 1
        self._is_counting = bool(self._waiting) or self._left < self._per_tick
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._refill)


class FairQueue(Generic[T]):
    """Gives slices of time to clients in rotation, and to the answers of each client in rotation.

    A client or an answer that had no work gets the next slice when new work comes. Clients with little work are
    therefore not delayed by clients with much work.
    """

    def __init__(self) -> None:
        self._clients: list[tuple[bool, int, Hashable]] = []
        """A heap of the clients with work. Clients with new work precede clients that already had a slice of time."""
        self.answers: dict[Hashable, list[tuple[bool, int, T]]] = {}
        """A heap of each client's answers with work. Answers with new work come first."""
        self._numbers = count()

    def add(self, who: Hashable, answer: T) -> None:
        """Add an answer that had no work before."""
        if who not in self.answers:
            self.answers[who] = []
            heappush(self._clients, (False, next(self._numbers), who))
        heappush(self.answers[who], (False, next(self._numbers), answer))

    def take(self) -> tuple[Hashable, T]:
        """Return the client and the answer of the next slice. The caller must call `give_back` afterwards."""
        who = heappop(self._clients)[2]
        return who, heappop(self.answers[who])[2]

    def give_back(self, who: Hashable, answer: T, *, has_more: bool) -> None:
        if has_more:
            heappush(self.answers[who], (True, next(self._numbers), answer))
        if self.answers[who]:
            heappush(self._clients, (True, next(self._numbers), who))
        else:
            del self.answers[who]
