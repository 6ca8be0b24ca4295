"""The client: sends requests to a processor and takes their tokens."""

from tokenbus_services.client.client import Client, connect
from tokenbus_services.client.operator import ControlError, Operator
from tokenbus_services.client.parameters import RequestParameters, StructuredOutput
from tokenbus_services.client.steps import RequestEnd, StepRows, Stream
from tokenbus_services.delivery import RequestFailedError, RequestTokens, Token
from tokenbus_services.delivery.tokens import Generation

__all__ = [
    "Client",
    "ControlError",
    "Generation",
    "Operator",
    "RequestEnd",
    "RequestFailedError",
    "RequestParameters",
    "RequestTokens",
    "StepRows",
    "Stream",
    "StructuredOutput",
    "Token",
    "connect",
]
