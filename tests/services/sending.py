"""The peers of a core that a test sends for: whoever says a name has it, unless the test says who each is."""

from collections.abc import Callable

from tokenbus_services.bus import ANONYMOUS, Identity, Outcome


class Sending:
    """Sends by a function, and knows who each peer is."""

    def __init__(self, send: Callable[[bytes, list[bytes]], Outcome]) -> None:
        """Take how to send."""
        self.send = send
        self.identities: dict[bytes, Identity] = {}
        self.admitted: set[bytes] = set()

    def identity(self, peer: bytes) -> Identity:
        """Return who a peer is."""
        return self.identities.get(peer, ANONYMOUS)

    def admit(self, peer: bytes) -> None:
        """Remember a peer that has introduced itself."""
        self.admitted.add(peer)
