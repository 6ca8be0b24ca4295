"""Errors of the bus, in a module that imports only the base class, so that every module can import it."""

from tokenbus.errors import UsageError


class BusError(Exception):
    """A message cannot be sent or received, or a peer cannot be reached."""


class AddressError(UsageError, BusError):
    """An address cannot be used, because it is invalid, taken or not permitted."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.address = address
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.address if self.address.isprintable() else ascii(self.address)}: {self.reason}"


class ClosedError(BusError):
    """The listener or connection was closed by its owner; a peer's departure never raises this error."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: closed on this side, by its owner")


class MessageError(BusError):
    """The caller tried to send a message that peers would refuse."""

    def __init__(self, limit: str, actual: int) -> None:
        super().__init__(limit, actual)
        self.limit = limit
        self.actual = actual

    def __str__(self) -> str:
        return f"message: {self.limit}, got {self.actual}"
