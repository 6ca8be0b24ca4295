"""What goes wrong when publishing; each says whose fault it is."""

from collections.abc import Iterable


class PublishError(RuntimeError):
    """Something was not published."""


class NotRunningError(PublishError):
    """The publisher was not started, or was closed, by its owner."""


class WouldWaitError(PublishError):
    """The caller is the event loop that would have to make the room it waits for; `await publisher.published(...)`."""


class RetentionFullError(PublishError):
    """There was no room, and there will be none in time: the requests of the batch end with an error."""

    def __init__(self, keys: Iterable[int], items: int, size: int, why: str) -> None:
        """Keep the keys of the requests that ended, and how much is retained."""
        self.request_keys = frozenset(keys)
        self.items = items
        self.bytes = size
        super().__init__(
            f"retention: no room ({why}): {items} items and {size} bytes wait for a processor; "
            f"{len(self.request_keys)} requests end with an error"
        )
