"""ZAP (ZeroMQ RFC 27): each handshake at a listening socket waits here for the answer whether its peer may connect."""

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
"""Properties of each frame: the number of its connection's handshake, and the key that its peer proved."""
_NAME = "inproc://zeromq.zap.01"
_log = logger("bus")


class Authenticator:
    """Answers libzmq's question whether a peer may connect (ZeroMQ RFC 27, ZAP), once all monitors have caught up.

    Otherwise a peer that is cut off right after its handshake would be gone before a monitor knew of it. A listener's
    domain says what its peers must prove: nothing, or an allowed key.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.before_answer: list[Callable[[], None]] = []
        """Called before each answer, so that every monitor knows of the connection."""
        self.handshakes = 0
        self.allowed: AllowList | None = None
        """The keys that KEYS_DOMAIN lets in; None: no key."""
        socket = context.socket(zmq.REP)
        socket.linger = 0
        socket.bind(_NAME)
        self._socket = LoopSocket(socket, "authenticator")
        self._repeated_log = DeduplicatedLog()
        self._task = asyncio.create_task(self._answer())

    async def close(self) -> None:
        """Stop answering."""
        self._socket.close()
        await self._task

    def is_read_out(self) -> bool:
        """Tell whether every handshake that waits for an answer has had it."""
        return self._socket.is_read_out()

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
        """Return a peer's user id, which is its key if it has to prove one, or None: it is refused."""
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
    """Return the properties that each frame of a connection has, in ZMTP's encoding."""
    name, value = HANDSHAKE.encode(), b"%d" % handshake
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
