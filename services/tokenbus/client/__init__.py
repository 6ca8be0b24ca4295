"""The client: sends requests to processors and receives their tokens."""

from tokenbus.client.client import Client, connect
from tokenbus.client.operator import ControlError, Operator
from tokenbus.client.parameters import RequestParameters, StructuredOutput
from tokenbus.client.steps import RequestEnd, StepRows, Stream
from tokenbus.client.tokens import Generation
from tokenbus.delivery import RequestFailedError, Token

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
