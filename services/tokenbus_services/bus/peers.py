"""The peers of a ZeroMQ listener: what each has proved, and which connection it is."""

from dataclasses import dataclass

import zmq

from tokenbus_services.bus.allowed import AllowList
from tokenbus_services.bus.identity import ANONYMOUS, Identity, Role

_NONE = Identity("", frozenset[Role](), ())


@dataclass(slots=True)
class _Peer:
    descriptor: int
    public: str
    """Its key, in Z85; empty where the listener asks for none."""


class Peers:
    """Peers by their routing id, from their first message to their connection's end."""

    def __init__(self, allowed: AllowList | None) -> None:
        """Take the allow-list of a listener that asks for keys."""
        self.allowed = allowed
        self._version = 0 if allowed is None else allowed.version
        self._known: dict[bytes, _Peer] = {}
        self._by_descriptor: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._known

    def learn(self, frame: zmq.Frame) -> bool:
        """Take the first frame of a peer's message; return whether its key is allowed, as it was at its handshake."""
        public = str(frame.get("User-Id")) if self.allowed is not None else ""
        if self.allowed is not None and self.allowed.find(public) is None:
            return False
        peer, descriptor = frame.bytes, int(frame.get(zmq.SRCFD))
        # A descriptor has one connection at a time: what had it before has ended.
        self._known.pop(self._by_descriptor.get(descriptor, b""), None)
        self._known[peer] = _Peer(descriptor, public)
        self._by_descriptor[descriptor] = peer
        return True

    def identity(self, peer: bytes) -> Identity:
        """Return who a peer is; its rights are those that the allow-list gives its key now."""
        if self.allowed is None:
            return ANONYMOUS
        known = self._known.get(peer)
        return (known and self.allowed.find(known.public)) or _NONE

    def descriptor(self, peer: bytes) -> int | None:
        """Return the descriptor of a peer's connection, or None: it has ended."""
        known = self._known.get(peer)
        return None if known is None else known.descriptor

    def has(self, descriptor: int) -> bool:
        """Return whether a known peer's connection has a descriptor."""
        return descriptor in self._by_descriptor

    def forget(self, descriptor: int) -> None:
        """Forget the peer of a connection that has ended."""
        self._known.pop(self._by_descriptor.pop(descriptor, b""), None)

    def revoked(self) -> list[int]:
        """Forget the peers whose keys are not allowed any more; return the descriptors of their connections."""
        allowed = self.allowed
        if allowed is None:
            return []
        allowed.refresh()
        if allowed.version == self._version:
            return []
        self._version = allowed.version
        gone = [each.descriptor for each in self._known.values() if allowed.find(each.public) is None]
        for descriptor in gone:
            self.forget(descriptor)
        return gone
