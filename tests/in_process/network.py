"""A network whose every message is in the test's hands: it waits until the test delivers, loses or damages it."""

from collections import deque
from itertools import count

from tokenbus.bus import Outcome

Message = list[bytes]


class Wire:
    """One connection: what is on its way from the peer to the processor (up), and from the processor to it (down)."""

    def __init__(self, peer: bytes, capacity: int) -> None:
        self.peer = peer
        self.up: deque[Message] = deque()
        self.down: deque[Message] = deque()
        self._capacity = capacity

    def send(self, parts: Message) -> bool:
        if len(self.up) >= self._capacity:
            return False
        self.up.append(list(parts))
        return True

    def deliver(self, parts: Message) -> bool:
        if len(self.down) >= self._capacity:
            return False
        self.down.append(list(parts))
        return True


class Network:
    """The connections to one address of a processor."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._ids = count(1)
        self.wires: dict[bytes, Wire] = {}

    def connect(self) -> Wire:
        """Make a connection under an id that no other ever had."""
        wire = Wire(b"peer-%d" % next(self._ids), self._capacity)
        self.wires[wire.peer] = wire
        return wire

    def reconnect(self, old: Wire, *, keeps_unsent: bool) -> Wire:
        """Break a connection and make a new one; what had not left the peer yet may go out over that."""
        wire = self.connect()
        if keeps_unsent:
            wire.up.extend(old.up)
        self.wires.pop(old.peer, None)
        return wire

    def send(self, peer: bytes, parts: Message) -> Outcome:
        wire = self.wires.get(peer)
        if wire is None:
            return Outcome.GONE
        return Outcome.SENT if wire.deliver(parts) else Outcome.FULL
