"""The processor: consumes workers' streams, restores order, and delivers."""

from tokenbus_services.delivery import RequestFailedError, RequestTokens, Step, Token
from tokenbus_services.processor.processor import TokenProcessor

__all__ = ["RequestFailedError", "RequestTokens", "Step", "Token", "TokenProcessor"]
