"""AckTracker: tracks which items of a stream consumers still need."""

from collections import deque


class PendingAck:
    """Delays the ack of a step's items until every consumer has released the step."""

    __slots__ = ("arrived_at", "bytes", "count", "holders", "items", "last_sequence", "ordinal", "stream", "unlogged")

    def __init__(self, count: int = 1) -> None:
        self.count = count
        """Number of consumers that need the items; the step itself counts as one consumer until it is delivered."""
        self.holders: list[object] = []
        """Send queues of remote clients that need the items; such clients can be evicted."""
        self.stream: AckTracker | None = None
        """Tracker of the stream, which is set with the first item."""
        self.last_sequence = 0
        self.ordinal = 0
        """Number of the step in the order of delivery, across all streams."""
        self.arrived_at = 0.0
        """Time at which the last item arrived."""
        self.items = 0
        self.bytes = 0
        self.unlogged = 0
        """Number of items that the durable log has not written yet; the log is a consumer that cannot be evicted."""

    def keep(self, holders: int = 1) -> None:
        self.count += holders

    def release(self) -> None:
        self.count -= 1


class AckTracker:
    """The unacknowledged items of a stream in order, each with its pending ack."""

    def __init__(self, acknowledged: int) -> None:
        self._items: deque[tuple[int, PendingAck, int]] = deque()
        self._passed = acknowledged
        self._reach = acknowledged
        self.acknowledged = acknowledged
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, sequence: int, pending_ack: PendingAck, size: int) -> None:
        pending_ack.stream = self
        pending_ack.last_sequence = max(pending_ack.last_sequence, sequence)
        pending_ack.items += 1
        pending_ack.bytes += size
        self.bytes += size
        self._items.append((sequence, pending_ack, size))

    @property
    def oldest(self) -> PendingAck | None:
        return self._items[0][1] if self._items else None

    @property
    def middle(self) -> int:
        """Sequence of the item in the middle of the unacknowledged items."""
        return self._items[len(self._items) // 2][0] if self._items else self.acknowledged

    def advance(self) -> bool:
        """Acknowledge the oldest items that no consumer needs, and return whether any item was acknowledged.

        An ack never divides a step, because a restarted processor must be able to assemble the remaining items.
        """
        items, before = self._items, self.acknowledged
        while items and items[0][1].count <= 0:
            sequence, pending_ack, size = items.popleft()
            self.bytes -= size
            self._passed = max(self._passed, sequence)
            self._reach = max(self._reach, pending_ack.last_sequence)
            if self._reach <= self._passed:
                self.acknowledged = self._passed
        return self.acknowledged > before
