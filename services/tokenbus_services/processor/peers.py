"""Peers: what a transport's listener says of who is connected to it, and does for the processor."""

from typing import Protocol

from tokenbus_services.bus import ANONYMOUS, Identity, Listener, Outcome


class Peers(Protocol):
    """The peers at one of the processor's addresses."""

    def send(self, peer: bytes, parts: list[bytes]) -> Outcome:
        """Send to one peer, without waiting."""

    def identity(self, peer: bytes) -> Identity:
        """Return who a peer is, as far as the transport has proved it."""

    def admit(self, peer: bytes) -> None:
        """Learn that a peer has introduced itself."""


class ListenerPeers:
    """The peers of a listener, as soon as there is one."""

    def __init__(self) -> None:
        """Begin without a listener: every peer is gone."""
        self.listener: Listener | None = None

    def send(self, peer: bytes, parts: list[bytes]) -> Outcome:
        """Send to one peer, without waiting."""
        return Outcome.GONE if self.listener is None else self.listener.send(peer, parts)

    def identity(self, peer: bytes) -> Identity:
        """Return who a peer is, as far as the transport has proved it."""
        return ANONYMOUS if self.listener is None else self.listener.identity(peer)

    def admit(self, peer: bytes) -> None:
        """Learn that a peer has introduced itself."""
        if self.listener is not None:
            self.listener.admit(peer)
