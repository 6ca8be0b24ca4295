"""What goes wrong on the bus; each says whose fault it is. Imports nothing, so that every module may raise it."""


class BusError(Exception):
    """Something cannot be sent, received or reached."""


class AddressError(BusError):
    """An address cannot be used: which, and why; the fault of whoever chose it, or of what is there already."""

    def __init__(self, address: str, reason: str) -> None:
        """Keep both."""
        super().__init__(address, reason)
        self.address = address
        self.reason = reason

    def __str__(self) -> str:
        """Return one printable line with both."""
        return f"{self.address if self.address.isprintable() else ascii(self.address)}: {self.reason}"


class ClosedError(BusError):
    """What is used was closed on this side, by its owner; a peer that goes away never causes this."""

    def __init__(self, what: str) -> None:
        """Keep what was closed."""
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        """Return a line that says whose doing it was."""
        return f"{self.what}: closed on this side, by its owner"


class MessageError(BusError):
    """A message was given that no peer would take; the fault of whoever sends it."""

    def __init__(self, limit: str, actual: int) -> None:
        """Keep the limit, as a phrase, and the measured value."""
        super().__init__(limit, actual)
        self.limit = limit
        self.actual = actual

    def __str__(self) -> str:
        """Return one line with both."""
        return f"message: {self.limit}, got {self.actual}"
