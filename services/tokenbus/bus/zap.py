"""ZAP (ZeroMQ RFC 27): decides for each handshake at a listening socket whether the peer may connect."""

import asyncio
import contextlib
from collections.abc import Callable

import zmq
from zmq.utils import z85

from tokenbus.bus.allow_list import KEY_BYTES, AllowList
from tokenbus.bus.errors import ClosedError
from tokenbus.bus.sockets import LoopSocket
from tokenbus.logs import DeduplicatedLog, logger

OPEN_DOMAIN, KEYS_DOMAIN = b"tokenbus", b"tokenbus.keys"
HANDSHAKE, USER = "Handshake", "User-Id"
"""Properties of each frame: the number of its connection's handshake, and the key that the peer proved."""
_NAME = "inproc://zeromq.zap.01"
_log = logger("bus")


class Authenticator:
    """Answers each handshake after all monitors have read their events.

    Otherwise a peer that is cut off right after its handshake would be gone before a monitor knows of it. Peers in the
    open domain prove nothing; peers in the domain of keys prove an allowed key.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.before_answer: list[Callable[[], None]] = []
        """Called before each answer, so that every monitor knows of the connection."""
        self.handshakes = 0
        self.allowed: AllowList | None = None
        """The keys of KEYS_DOMAIN; None: no key is allowed."""
        socket = context.socket(zmq.REP)
        socket.linger = 0
        socket.bind(_NAME)
        self._socket = LoopSocket(socket, "authenticator")
        self.is_read_out = self._socket.is_read_out
        self._repeated_log = DeduplicatedLog()
        self._task = asyncio.create_task(self._answer())

    async def close(self) -> None:
        self._socket.close()
        await self._task

    async def _answer(self) -> None:
        with contextlib.suppress(ClosedError):
            while True:
                version, request_id, domain, address, _, mechanism, *credentials = await self._socket.receive()
                for catch_up in self.before_answer:
                    catch_up()
                self.handshakes += 1
                user = self._user(domain, mechanism, credentials, address)
                verdict = [b"400", b"not allowed", b"", b""]
                if user is not None:
                    verdict = [b"200", b"OK", user, _properties(self.handshakes)]
                with contextlib.suppress(zmq.ZMQError):  # the asking socket is closed
                    self._socket.send([version, request_id, *verdict])

    def _user(self, domain: bytes, mechanism: bytes, credentials: list[bytes], address: bytes) -> bytes | None:
        """Return a peer's user id: the key that it proved, or empty in the open domain; None: refuse the peer."""
        if (domain, mechanism) == (OPEN_DOMAIN, b"NULL"):
            return b""
        if (domain, mechanism) != (KEYS_DOMAIN, b"CURVE") or self.allowed is None:
            return None
        if [len(each) for each in credentials] != [KEY_BYTES]:
            return None
        public: bytes = z85.encode(credentials[0])
        self.allowed.refresh()
        if self.allowed.find(public.decode()) is None:
            peer = address.decode(errors="replace")
            self._repeated_log.begin(public, _log.warning, "key not allowed", public=public.decode(), address=peer)
            return None
        return public


def _properties(handshake: int) -> bytes:
    """Return the metadata of a connection's frames, in the encoding of ZMTP."""
    name, value = HANDSHAKE.encode(), b"%d" % handshake
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
