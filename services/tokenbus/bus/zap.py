"""ZAP (ZeroMQ RFC 27): decides at each handshake whether the peer may connect to the listening socket."""

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
"""Properties of each received frame: the number of the connection's handshake, and the public key of the peer."""
_NAME = "inproc://zeromq.zap.01"
_log = logger("bus")


class Authenticator:
    """Answers each handshake after all monitors have read their events.

    With an earlier answer, a connection could complete its handshake and end before a monitor knows the connection. In
    the open domain, peers need no key. In the key domain, each peer must prove an allowed key.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.before_answer: list[Callable[[], None]] = []
        """Callbacks that run before each answer, so that every monitor knows the new connection."""
        self.handshakes = 0
        self.allowed: AllowList | None = None
        """Allowed keys in the key domain, or None if no key is allowed."""
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
                with contextlib.suppress(zmq.ZMQError):  # the socket that requested the verdict has closed
                    self._socket.send([version, request_id, *verdict])

    def _user(self, domain: bytes, mechanism: bytes, credentials: list[bytes], address: bytes) -> bytes | None:
        """Return the peer's verified key, b"" if the peer needs no key, or None to refuse the peer."""
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
    """Return ZMTP metadata that libzmq attaches to each frame of the connection."""
    name, value = HANDSHAKE.encode(), b"%d" % handshake
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
