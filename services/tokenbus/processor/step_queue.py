"""StepQueue: the steps that `Processor.steps` has not taken yet."""

import asyncio

from tokenbus.delivery import Step


class StepQueue:
    """Steps for the iterator over all of them; when it is full workers get no more credit, so it stays bounded."""

    def __init__(self, max_steps: int) -> None:
        self._steps: asyncio.Queue[Step | None] = asyncio.Queue()
        self._max_steps = max_steps
        self._current: Step | None = None

    def __len__(self) -> int:
        return self._steps.qsize()

    @property
    def is_full(self) -> bool:
        """Whether no more should come for now."""
        return len(self) >= self._max_steps

    def put(self, step: Step) -> None:
        """Add a step; it stays unacknowledged until its consumer asks for the next one."""
        step.pending_ack.keep()
        self._steps.put_nowait(step)

    async def get(self) -> Step | None:
        """Return the next step, or None: there will be none. The one before is acknowledged: its consumer is done."""
        self._release()
        self._current = await self._steps.get()
        return self._current

    def close(self) -> None:
        """Let what waits be taken, and then end."""
        self._steps.put_nowait(None)

    def discard(self) -> None:
        """Drop everything: it is not taken any more."""
        self._release()
        while not self._steps.empty():
            self._current = self._steps.get_nowait()
            self._release()

    def _release(self) -> None:
        if self._current is not None:
            self._current.pending_ack.release()
            self._current = None
