"""Steps and tokens for consumers, and the pending acks of steps."""

from tokenbus.delivery.ack_tracker import AckTracker, PendingAck
from tokenbus.delivery.errors import RequestFailedError
from tokenbus.delivery.step import Step, Token

__all__ = ["AckTracker", "PendingAck", "RequestFailedError", "Step", "Token"]
