"""What every ZeroMQ handshake of a context waits for.

libzmq asks whoever is bound to a well-known name whether a peer may come in (ZeroMQ RFC 27), and waits for the answer:
not before the monitors have looked at its connection, or a peer that is cut off right after its handshake would be gone
before anything could be said of it. A listener's domain says what its peers must prove: nothing, or an allowed key.
"""

import asyncio
import contextlib
from typing import Protocol

import zmq
from zmq.utils import z85

from tokenbus_services.bus.allowed import AllowList
from tokenbus_services.bus.errors import ClosedError
from tokenbus_services.bus.keys import KEY_BYTES
from tokenbus_services.bus.sockets import LoopSocket
from tokenbus_services.logs import DeduplicatedLog, logger

OPEN_DOMAIN, KEYS_DOMAIN = b"tokenbus", b"tokenbus.keys"
HANDSHAKE, USER = "Handshake", "User-Id"
"""What a message's frames say of its connection: the how-many-th handshake it was, and the key that it proved."""
_NAME = "inproc://zeromq.zap.01"
_log = logger("bus")


class Watcher(Protocol):
    """Who wants to see connections before they are used."""

    def catch_up(self) -> None:
        """Look at all connections there are."""


class Gate:
    """Answers each handshake after all watchers have looked at its connection."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """Begin to answer."""
        self.watchers: list[Watcher] = []
        self.handshakes = 0
        """How many have been answered."""
        self.allowed: AllowList | None = None
        """Which keys the domain of keys lets in; None: no key."""
        socket = context.socket(zmq.REP)
        socket.linger = 0
        socket.bind(_NAME)
        self._socket = LoopSocket(socket, "gate")
        self._repeated_log = DeduplicatedLog()
        self._task = asyncio.create_task(self._answer())

    async def close(self) -> None:
        """Answer no more."""
        self._socket.close()
        await self._task

    async def _answer(self) -> None:
        with contextlib.suppress(ClosedError):
            while True:
                version, request_id, domain, address, _, mechanism, *credentials = await self._socket.receive()
                for watcher in self.watchers:
                    watcher.catch_up()
                self.handshakes += 1
                user = self._user(domain, mechanism, credentials, address)
                verdict = [b"400", b"not allowed", b"", b""]
                if user is not None:
                    verdict = [b"200", b"OK", user, _properties(self.handshakes)]
                with contextlib.suppress(zmq.ZMQError):  # who asked has left
                    self._socket.send([version, request_id, *verdict])

    def _user(self, domain: bytes, mechanism: bytes, credentials: list[bytes], address: bytes) -> bytes | None:
        """Return the user id of a peer, which is its key where keys are asked for, or None: it may not come in."""
        if (domain, mechanism) == (OPEN_DOMAIN, b"NULL"):
            return b""
        if (domain, mechanism) != (KEYS_DOMAIN, b"CURVE") or self.allowed is None:
            return None
        if [len(each) for each in credentials] != [KEY_BYTES]:
            return None
        public: bytes = z85.encode(credentials[0])
        self.allowed.refresh()
        if self.allowed.find(public.decode()) is None:
            where = address.decode(errors="replace")
            self._repeated_log.begin(public, _log.warning, "key not allowed", public=public.decode(), address=where)
            return None
        return public


def _properties(handshake: int) -> bytes:
    """Return what every frame of a connection says, as ZMTP's properties are written."""
    name, value = HANDSHAKE.encode(), b"%d" % handshake
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
