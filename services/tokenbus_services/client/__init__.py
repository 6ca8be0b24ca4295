"""The client: sends requests to a processor and takes their tokens."""

from tokenbus.delivery import RequestFailedError, Token
from tokenbus_services.client.client import Client, connect
from tokenbus_services.client.operator import ControlError, Operator
from tokenbus_services.client.parameters import RequestParameters, StructuredOutput
from tokenbus_services.client.steps import RequestEnd, StepRows, Stream
from tokenbus_services.client.tokens import Generation

__all__ = [
    "Client",
    "ControlError",
    "Generation",
    "Operator",
    "RequestEnd",
    "RequestFailedError",
    "RequestParameters",
    "StepRows",
    "Stream",
    "StructuredOutput",
    "Token",
    "connect",
]
