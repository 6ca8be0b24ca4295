"""The queues of `Processor.steps` and `Processor.generate`: steps, and a request's rows, until they are taken."""

import asyncio
from collections import deque
from itertools import repeat

from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import Admitted, PromptScoresChunk, RequestError
from tokenbus_services.delivery import AckTracker, PendingAck, RequestTokens, Step
from tokenbus_services.delivery.slots import Slots
from tokenbus_services.delivery.waiter import WakeUps
from tokenbus_services.processor.requests import Request, RequestTable
from tokenbus_services.processor.step_parts import Part

_NOWHERE: deque[tuple[Step, int]] = deque(maxlen=0)
"""Where rows go of requests that do not wait here."""


class RequestBuffers:
    """A consumer that puts each row into its request's RequestTokens, for a client or an iterator to take it."""

    name = ""
    looks_elsewhere = False
    keeps_up = False

    def __init__(self, table: RequestTable, max_rows: int) -> None:
        self._table = table
        self._max_rows = max_rows
        # By slot, beside the table's contexts: a step's rows are added without a line of Python for each.
        self._rows: list[deque[tuple[Step, int]]] = []
        self._wake_ups = WakeUps()
        self._over_full: list[RequestTokens] = []

    @property
    def is_over_full(self) -> bool:
        """Whether some request had more rows waiting than may wait, when that was looked at last."""
        return bool(self._over_full)

    def open(self, request: Request, position: int = 0) -> RequestTokens:
        """Let a request's rows wait from now on, and return where."""
        tokens = RequestTokens(request.id, position, wake_ups=self._wake_ups)
        self._table.contexts[request.slot] = tokens
        while len(self._rows) <= request.slot:
            self._rows.append(_NOWHERE)
        self._rows[request.slot] = tokens.waiting
        return tokens

    def adopt(self, request: Request) -> RequestTokens:
        """Return where a request's rows wait, and will wait from now on if they went elsewhere before."""
        tokens = self._table.contexts[request.slot]
        return tokens if isinstance(tokens, RequestTokens) else self.open(request)

    def tokens_of(self, request: Request) -> RequestTokens:
        """Return where a request's rows wait."""
        tokens = self._table.contexts[request.slot]
        if not isinstance(tokens, RequestTokens):
            raise TypeError(f"request {request.id:016x} has no buffer")
        return tokens

    def give(self, step: Step, slots: Slots, part: Part) -> None:
        """Take a part of a step."""
        step.pending_ack.keep(part.rows.size)
        buffers = map(self._rows.__getitem__, slots[part.rows].tolist())
        # The fastest loop that Python has: `append` of each buffer, and nothing is kept of its results.
        deque(map(deque.append, buffers, zip(repeat(step), part.rows.tolist(), strict=False)), maxlen=0)
        self._wake_ups.look()

    def admitted(self, request: Request, admitted: Admitted) -> None:
        """Learn which worker took a request: an iterator does not ask."""

    def scored(self, request: Request, chunk: PromptScoresChunk, pending_ack: PendingAck) -> None:
        """Keep what the model says of some of a prompt's tokens."""
        pending_ack.keep()
        self.tokens_of(request).put_scores(chunk, pending_ack)

    def look_elsewhere(self, error: RequestError) -> None:
        """Learn that other processors may have a part of a request: an iterator knows of this one alone."""

    def unacknowledged_of(self, _acks: AckTracker) -> set[int]:
        """Return none: no client has what waits here."""
        return set()

    def finish(self, request: Request, status: RowStatus) -> None:
        """Learn that a request has had its last row."""
        self.tokens_of(request).finish(status)
        self._rows[request.slot] = _NOWHERE

    def fail(self, request: Request, error: RequestError) -> None:
        """Learn that a request ended with an error."""
        self.tokens_of(request).fail(error)
        self._rows[request.slot] = _NOWHERE

    def check(self, pending_items: int) -> list[RequestTokens]:
        """Return those that have more rows waiting than may wait; none can, where fewer items are pending."""
        most = self._max_rows
        found = self._table.contexts if pending_items > most else []
        self._over_full = [
            tokens for tokens in found if isinstance(tokens, RequestTokens) and len(tokens.waiting) > most
        ]
        return self._over_full

    def forget(self, tokens: RequestTokens) -> None:
        """Drop the rows of a request that is not read any more."""
        for step, _ in tokens.give_up():
            step.pending_ack.release()
        for _, pending_ack in tokens.give_up_scores():
            pending_ack.release()


class StepQueue:
    """Steps for the iterator over all of them; when it is full workers get no more credit, so it stays bounded."""

    def __init__(self, max_steps: int) -> None:
        self._steps: asyncio.Queue[Step | None] = asyncio.Queue()
        self._max_steps = max_steps
        self._current: Step | None = None
        self.peak = 0

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
        self.peak = max(self.peak, len(self))

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
