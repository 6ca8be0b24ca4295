"""AdmissionLimiter: lets a few requests begin at a time, so that a burst of new ones holds up no stream that runs."""

import asyncio
from collections import deque


class AdmissionLimiter:
    """So many turns for each time that the event loop has looked at its sockets; who comes first has the first."""

    def __init__(self, at_once: int) -> None:
        """Take how many there are at a time."""
        self._at_once = at_once
        self._left = at_once
        self._is_counting = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self) -> None:
        """Wait for a turn."""
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

    def _refill(self) -> None:
        self._left = self._at_once
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else who waited has gone
                turn.set_result(None)
                self._left -= 1
        self._is_counting = bool(self._waiting) or self._left < self._at_once
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._refill)
