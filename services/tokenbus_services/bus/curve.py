"""Which sockets speak CURVE, and with which keys: those at tcp addresses of a process that has a key."""

import zmq
from zmq.utils import z85

from tokenbus_services.bus.addresses import IpcEndpoint, TcpEndpoint
from tokenbus_services.bus.allowed import AllowList
from tokenbus_services.bus.errors import AddressError
from tokenbus_services.bus.keys import KEY_BYTES, KeyPair, load_key, public_key
from tokenbus_services.logs import logger
from tokenbus_services.settings import BusSettings, SettingsError

_log = logger("bus")


class Curve:
    """The keys of one process, read from their files when a socket needs them first."""

    def __init__(self, settings: BusSettings) -> None:
        """Take the paths from the settings."""
        self._settings = settings
        self._own: KeyPair | None = None
        self._allowed: AllowList | None = None
        self._warned = False

    def for_listener(self, endpoint: TcpEndpoint | IpcEndpoint) -> tuple[KeyPair, AllowList] | None:
        """Return the key of a listener and whom it lets in, or None: it asks for no keys.

        Raises a SettingsError for a file that cannot be used, and an AddressError for an address that needs keys.
        """
        if isinstance(endpoint, IpcEndpoint):
            return None
        if not self._settings.key_file:
            self._check_without_keys(endpoint)
            return None
        if not self._settings.allowed_keys:
            limit = "the file of allowed keys, which a tcp listener with bus.key_file needs (`tokenbus keys`)"
            raise SettingsError("bus.allowed_keys", limit, "")
        if self._allowed is None:
            self._allowed = AllowList(self._settings.allowed_keys)
        return self._key(), self._allowed

    def for_connection(
        self, endpoint: TcpEndpoint | IpcEndpoint, server_key: bytes | None
    ) -> tuple[KeyPair, bytes] | None:
        """Return the key of a connection and its listener's public one, or None: it is made without keys."""
        if isinstance(endpoint, IpcEndpoint):
            return None
        settings = self._settings
        if server_key is None and bool(settings.key_file) is not bool(settings.server_key):
            key, other = ("server_key", "key_file") if settings.key_file else ("key_file", "server_key")
            raise SettingsError(f"bus.{key}", f"a key, which a tcp connection with bus.{other} needs too", "")
        listener = self._server_key() if server_key is None else server_key
        if not listener:
            self._check_without_keys(endpoint)
            return None
        if len(listener) != KEY_BYTES or not settings.key_file:
            wrong = f"its key has {len(listener)} bytes" if settings.key_file else "set bus.key_file"
            raise AddressError(str(endpoint), f"its listener asks for keys: {wrong}")
        return self._key(), listener

    def _key(self) -> KeyPair:
        if self._own is None:
            self._own = load_key(self._settings.key_file)
        return self._own

    def _server_key(self) -> bytes:
        given = self._settings.server_key
        if not given:
            return b""
        try:
            return raw(public_key(given))
        except ValueError as error:
            raise SettingsError("bus.server_key", str(error), given) from None

    def _check_without_keys(self, endpoint: TcpEndpoint) -> None:
        if endpoint.is_loopback:
            return
        if not self._settings.insecure:
            reason = "beyond loopback it needs keys (bus.key_file), unless bus.insecure is true"
            raise AddressError(str(endpoint), reason)
        if not self._warned:
            self._warned = True
            _log.warning("bus without keys beyond loopback", address=str(endpoint), setting="bus.insecure")


def serve(socket: "zmq.Socket[bytes]", own: KeyPair) -> None:
    """Let a socket that will listen ask for keys."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)


def prove(socket: "zmq.Socket[bytes]", own: KeyPair, listener: bytes) -> None:
    """Let a socket that will connect show its key, to the listener that has another."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, listener)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)


def raw(public: bytes) -> bytes:
    """Return the 32 bytes that a key in Z85 stands for."""
    decoded: bytes = z85.decode(public)
    return decoded
