"""The peers of a core, as a test plays them: every peer is anonymous unless the test gives it an identity."""

from collections.abc import Callable, Container

from tokenbus.bus import ANONYMOUS, Identity, Outcome


class Sending:
    def __init__(
        self, send: Callable[[bytes, list[bytes]], Outcome], connected: Container[bytes] | None = None
    ) -> None:
        """Count peers as connected as long as they are among some, or until they are in `gone`."""
        self.send = send
        self._connected = connected
        self.identities: dict[bytes, Identity] = {}
        self.gone: set[bytes] = set()
        self.admitted: set[bytes] = set()
        self.cut: list[bytes] = []
        """Those that the core disconnected."""

    def identity(self, peer: bytes) -> Identity:
        return self.identities.get(peer, ANONYMOUS)

    def is_connected(self, peer: bytes) -> bool:
        return peer not in self.gone and (self._connected is None or peer in self._connected)

    def admit(self, peer: bytes) -> None:
        self.admitted.add(peer)

    def disconnect(self, peer: bytes) -> None:
        self.cut.append(peer)
