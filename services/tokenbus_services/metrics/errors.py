"""What goes wrong when metrics are to be served."""

from tokenbus_services.bus.errors import AddressError


class MetricsAddressError(AddressError):
    """Metrics cannot be served where the settings say: which key, which address, and why."""

    def __init__(self, key: str, address: str, reason: str) -> None:
        """Keep the setting's key too: a host may run many processes, each with an address of its own."""
        super().__init__(address, reason)
        self.args = (key, address, reason)
        self.key = key

    def __str__(self) -> str:
        """Return one printable line."""
        return f"{self.key}: {super().__str__()}"
