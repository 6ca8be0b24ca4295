"""The processor: consumes workers' streams, restores order, and delivers."""

from tokenbus_services.delivery import RequestFailedError, RequestTokens, Step, Token
from tokenbus_services.processor.processor import Processor

__all__ = ["Processor", "RequestFailedError", "RequestTokens", "Step", "Token"]
