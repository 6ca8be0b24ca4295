"""What is handed to consumers: steps, tokens, and the pending acks that tell when they have been taken."""

from tokenbus_services.delivery.ack_tracker import AckTracker, PendingAck
from tokenbus_services.delivery.errors import RequestFailedError
from tokenbus_services.delivery.step import Step, Token

__all__ = ["AckTracker", "PendingAck", "RequestFailedError", "Step", "Token"]
