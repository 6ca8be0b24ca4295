"""Credit: how many items, and how many bytes of them, a worker may send."""

from tokenbus_contracts.generated.stream_pb2 import Credit
from tokenbus_services.settings import ProcessorSettings


class GrantedCredit:
    """What one worker was granted, and what it has used, counted anew in each connection.

    A grant is a total: up to which sequence, and how many bytes since the handshake. So one that is lost costs nothing
    but the time until the next. What the worker sends beyond it is a flood.
    """

    def __init__(self, settings: ProcessorSettings) -> None:
        self._items, self._bytes = settings.credit_items, settings.credit_bytes
        self.through_sequence = 0
        self.through_bytes = 0
        self.used_bytes = 0

    def reset(self) -> None:
        """Count anew: the worker says hello in another connection."""
        self.through_sequence = self.through_bytes = self.used_bytes = 0

    def left(self, last_sent: int) -> tuple[int, int]:
        """Return how many more items, and how many more bytes, a worker may send that has sent up to a sequence."""
        return max(0, self.through_sequence - last_sent), max(0, self.through_bytes - self.used_bytes)

    def is_due(self, in_order: int) -> bool:
        """Tell whether so much was used that a grant is worth a message, when items came in order up to a sequence."""
        items = in_order + self._items - self.through_sequence
        size = self.used_bytes + self._bytes - self.through_bytes
        return items >= max(1, self._items // 4) or size >= max(1, self._bytes // 4)

    def grant(self, in_order: int) -> bool:
        """Let the worker send as much as may be on its way, if that is worth a message; tell whether it is."""
        is_due = self.is_due(in_order)
        if is_due:
            self.through_sequence, self.through_bytes = in_order + self._items, self.used_bytes + self._bytes
        return is_due

    def frame(self) -> Credit:
        """Return what the worker is told."""
        return Credit(through_sequence=self.through_sequence, bytes=self.through_bytes)
