"""The hand-off: a prefill worker's requests go on at a decode worker."""

from tokenbus_services.worker.handoff.receiver import HandoffReceiver
from tokenbus_services.worker.handoff.sender import HandoffSender

__all__ = ["HandoffReceiver", "HandoffSender"]
