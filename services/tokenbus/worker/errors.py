"""Errors of publishing. This module imports nothing, so that every module can import it."""

from collections.abc import Iterable


class PublishError(RuntimeError):
    """A batch or an event was not published."""


class NotRunningError(PublishError):
    """The publisher was not started, was closed by its owner, or cannot start its process."""


class WouldWaitError(PublishError):
    """`publish` would block the event loop that receives acks, so use `await publisher.published(...)` instead."""


class RetentionFullError(PublishError):
    """Retention stayed full for longer than the policy allows, so the batch's requests end with an error."""

    def __init__(self, request_ids: Iterable[int], items: int, size: int, why: str) -> None:
        self.request_ids = frozenset(request_ids)
        self.items = items
        self.bytes = size
        super().__init__(
            f"retention: no room ({why}): {items} items and {size} bytes wait for a processor; "
            f"{len(self.request_ids)} requests end with an error"
        )
