"""Which items of a stream have reached all of their consumers, so that its worker may forget them."""

from collections import deque


class PendingAck:
    """The pending acknowledgement of one step's items: they are acknowledged when its last consumer releases them."""

    __slots__ = ("arrived_at", "bytes", "count", "holders", "items", "last_sequence", "stream", "unlogged")

    def __init__(self, count: int = 1) -> None:
        self.count = count
        """How many consumers need its items; the first is the step itself, until it is handed out."""
        self.holders: list[object] = []
        """Those of its consumers that can be evicted: the send queues of remote clients."""
        self.stream: AckTracker | None = None
        """The tracker of its stream, once an item belongs to it."""
        self.last_sequence = 0
        self.arrived_at = 0.0
        """When its last item came."""
        self.items = 0
        self.bytes = 0
        self.unlogged = 0
        """How many of its consumers are the durable log, which cannot be evicted: items that it does not have yet."""

    def keep(self, holders: int = 1) -> None:
        """Count more consumers."""
        self.count += holders

    def release(self) -> None:
        """Count a consumer that is done."""
        self.count -= 1


class AckTracker:
    """A stream's items in order, each with the pending ack that it belongs to."""

    def __init__(self, acknowledged: int) -> None:
        self._items: deque[tuple[int, PendingAck, int]] = deque()
        self._passed = acknowledged
        self._reach = acknowledged
        self.acknowledged = acknowledged
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, sequence: int, pending_ack: PendingAck, size: int) -> None:
        """Add an item, the next in order, to a pending ack."""
        pending_ack.stream = self
        pending_ack.last_sequence = max(pending_ack.last_sequence, sequence)
        pending_ack.items += 1
        pending_ack.bytes += size
        self.bytes += size
        self._items.append((sequence, pending_ack, size))

    @property
    def oldest(self) -> PendingAck | None:
        """The pending ack that holds the stream back the longest."""
        return self._items[0][1] if self._items else None

    @property
    def middle(self) -> int:
        """The sequence of the item in the middle of those that are pending."""
        return self._items[len(self._items) // 2][0] if self._items else self.acknowledged

    def advance(self) -> bool:
        """Acknowledge what no consumer needs; tell whether that was anything.

        Never in the middle of a step: a restarted processor must be able to assemble what is left.
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

    def skip(self, through: int) -> None:
        """Count a run of items that cannot be had as passed."""
        self.add(through, PendingAck(0), 0)
