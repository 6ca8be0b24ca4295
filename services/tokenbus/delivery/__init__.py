"""What is handed to consumers: steps, tokens, and the pending acks that tell when they have been taken."""

from tokenbus.delivery.ack_tracker import AckTracker, PendingAck
from tokenbus.delivery.errors import RequestFailedError
from tokenbus.delivery.step import Step, Token

__all__ = ["AckTracker", "PendingAck", "RequestFailedError", "Step", "Token"]
