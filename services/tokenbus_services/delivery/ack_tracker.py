"""Which items of a stream have reached those they concern, so that its worker may forget them."""

from collections import deque


class PendingAck:
    """One step's claim on its items: they are acknowledged when its last holder lets go of them."""

    __slots__ = ("bytes", "count", "holders", "last_sequence", "stream")

    def __init__(self) -> None:
        """Begin with one holder: who makes the step."""
        self.count = 1
        self.holders: list[object] = []
        """Those of its holders that can be asked to let go: the queues of remote clients."""
        self.stream: AckTracker | None = None
        """The items of its stream, once it holds one of them."""
        self.last_sequence = 0
        self.bytes = 0

    def keep(self, holders: int = 1) -> None:
        """Count more holders."""
        self.count += holders

    def release(self, holders: int = 1) -> None:
        """Count holders that are done."""
        self.count -= holders


class AckTracker:
    """A stream's items in order, each with the hold that it belongs to."""

    def __init__(self, acknowledged: int) -> None:
        """Begin after the last item that was acknowledged."""
        self._items: deque[tuple[int, PendingAck, int]] = deque()
        self._passed = acknowledged
        self._reach = acknowledged
        self.acknowledged = acknowledged
        self.bytes = 0
        self.peak = 0

    def __len__(self) -> int:
        """Return how many items are held."""
        return len(self._items)

    def add(self, sequence: int, pending_ack: PendingAck, size: int) -> None:
        """Count an item, the next in order, to a hold."""
        pending_ack.stream = self
        pending_ack.last_sequence = max(pending_ack.last_sequence, sequence)
        pending_ack.bytes += size
        self.bytes += size
        self._items.append((sequence, pending_ack, size))
        self.peak = max(self.peak, len(self._items))

    @property
    def oldest(self) -> PendingAck | None:
        """The hold that keeps the stream back the longest."""
        return self._items[0][1] if self._items else None

    @property
    def middle(self) -> int:
        """The sequence of the item in the middle of those that are held."""
        return self._items[len(self._items) // 2][0] if self._items else self.acknowledged

    def advance(self) -> bool:
        """Acknowledge what nobody holds; tell whether that was anything.

        Never in the middle of a step: who starts anew must be able to assemble what is left.
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
        pending_ack = PendingAck()
        pending_ack.release()
        self.add(through, pending_ack, 0)
