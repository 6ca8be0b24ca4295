"""The client: asks a processor for requests, and takes their tokens."""

from tokenbus_services.client.client import TokenClient, WatchedItem
from tokenbus_services.delivery import RequestFailedError, RequestTokens, Token

__all__ = ["RequestFailedError", "RequestTokens", "Token", "TokenClient", "WatchedItem"]
