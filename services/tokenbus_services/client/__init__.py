"""The client: asks a processor for requests, and takes their tokens."""

from tokenbus_services.client.client import Client, WatchedItem
from tokenbus_services.delivery import RequestFailedError, RequestTokens, Token

__all__ = ["Client", "RequestFailedError", "RequestTokens", "Token", "WatchedItem"]
