"""StepQueue: steps on their way to who iterates over all of them."""

import asyncio
from collections import deque

from tokenbus_services.delivery import Step


class StepQueue:
    """A queue of steps that says when it is full; workers get no more credit then, so it stays bounded."""

    def __init__(self, max_steps: int) -> None:
        """Be full with so many steps."""
        self._steps: deque[Step] = deque()
        self._max_steps = max_steps
        self._waiter: asyncio.Future[None] | None = None
        self._current: Step | None = None
        self.is_closed = False
        self.peak = 0

    def __len__(self) -> int:
        """Return how many steps wait."""
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        """Whether no more should come for now."""
        return len(self._steps) >= self._max_steps

    def put(self, step: Step) -> None:
        """Add a step; it is held until its consumer asks for the next one."""
        step.pending_ack.keep()
        self._steps.append(step)
        self.peak = max(self.peak, len(self._steps))
        self._wake()

    async def get(self) -> Step | None:
        """Return the next step, or None: there will be none."""
        self.release()
        while not self._steps:
            if self.is_closed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._current = self._steps.popleft()
        return self._current

    def release(self) -> None:
        """Let go of the step that was taken last: its consumer is done with it."""
        if self._current is not None:
            self._current.pending_ack.release()
            self._current = None

    def close(self) -> None:
        """Let what waits be taken, and then end."""
        self.is_closed = True
        self._wake()

    def discard(self) -> None:
        """Let go of everything: nobody takes it any more."""
        self.release()
        while self._steps:
            self._steps.popleft().pending_ack.release()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
