"""The worker: what an engine embeds to publish what it emits."""

from tokenbus_services.worker.errors import NotRunningError, PublishError, RetentionFullError, WouldWaitError
from tokenbus_services.worker.publisher import Publisher

__all__ = ["NotRunningError", "PublishError", "Publisher", "RetentionFullError", "WouldWaitError"]
