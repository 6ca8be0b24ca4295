"""CURVE keys: key files, the keys of a process, and the sockets that use the keys."""

import os
import stat
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

from tokenbus.bus.addresses import IpcEndpoint, TcpEndpoint
from tokenbus.bus.allow_list import KEY_LENGTH, AllowList, is_key
from tokenbus.bus.errors import AddressError
from tokenbus.logs import logger
from tokenbus.printable import reason_of
from tokenbus.settings import BusSettings, SettingsError

_FOLDER_MODE, _SECRET_MODE, _PUBLIC_MODE = 0o700, 0o600, 0o644
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_log = logger("bus")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The CURVE key pair of a process, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


def check_private(setting: str, path: str) -> None:
    """Raise SettingsError if a secret file is unreadable, or if other users may read it."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError) as error:
        raise SettingsError(setting, f"a file that can be read: {_reason(error)}", path) from None
    if mode & _OTHERS:
        limit = "a file that only its owner may read (chmod 600)"
        raise SettingsError(setting, limit, f"{path} of mode {stat.S_IMODE(mode):04o}")


def load_key(path: str) -> KeyPair:
    """Return the key pair in a file; raises SettingsError if other users may read the file, or if it has no key."""
    check_private("bus.key_file", path)
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise SettingsError("bus.key_file", f"a key file that can be read: {_reason(error)}", path) from None
    if secret is None or not (is_key(public) and is_key(secret)):
        raise SettingsError("bus.key_file", "a file with a secret key, as `tokenbus keys make` writes it", path)
    return KeyPair(public, secret)


def public_key(given: str) -> bytes:
    """Return a public key in Z85, from a key or the path of its certificate; raises ValueError for an invalid key."""
    path = Path(given)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # the text is no valid path, for example because it is too long
        is_file = False
    if is_file:
        try:
            public, _ = zmq.auth.load_certificate(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"a public certificate that can be read: {_reason(error)}") from None
    else:
        public = given.encode()
    if not is_key(public):
        raise ValueError(f"a public key of {KEY_LENGTH} characters, or the path of a public certificate")
    return public


def create_key(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a new key pair to NAME.key and NAME.key_secret, and return both paths.

    A missing folder is created with access for its owner only. Raises OSError if a file of that name exists.
    """
    folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    public, secret = folder / f"{name}.key", folder / f"{name}.key_secret"
    # The temporary folder is private, because other users may be able to read a new file before its mode is set.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as draft:
        made = [Path(path) for path in zmq.auth.create_certificates(draft, name, {"name": name})]
        made[0].chmod(_PUBLIC_MODE)
        made[1].chmod(_SECRET_MODE)
        os.link(made[1], secret)
        try:
            os.link(made[0], public)
        except OSError:
            secret.unlink()
            raise
    return public, secret


def _reason(error: Exception) -> str:
    return "no such file" if "Invalid certificate file" in str(error) else reason_of(error)


class ProcessKeys:
    """The keys of one process, which are read when a socket first needs them."""

    def __init__(self, settings: BusSettings) -> None:
        self._settings = settings
        self._warned = False

    def for_listener(self, endpoint: TcpEndpoint | IpcEndpoint) -> tuple[KeyPair, AllowList] | None:
        """Return a listener's key pair and allow-list, or None if the endpoint works without keys.

        Raises SettingsError for an invalid key file or allow-list, and AddressError for an address that needs keys.
        """
        if isinstance(endpoint, IpcEndpoint):
            return None
        if not self._settings.key_file:
            self._check_without_keys(endpoint)
            return None
        if not self._settings.allowed_keys:
            limit = "the file of allowed keys, which a tcp listener with bus.key_file needs (`tokenbus keys`)"
            raise SettingsError("bus.allowed_keys", limit, "")
        return self._own, self._allowed

    def for_connection(self, endpoint: TcpEndpoint | IpcEndpoint) -> tuple[KeyPair, bytes] | None:
        """Like `for_listener`, but return the key pair of a connection and the public key of its listener."""
        if isinstance(endpoint, IpcEndpoint):
            return None
        settings = self._settings
        if bool(settings.key_file) is not bool(settings.server_key):
            key, other = ("server_key", "key_file") if settings.key_file else ("key_file", "server_key")
            raise SettingsError(f"bus.{key}", f"a key, which a tcp connection with bus.{other} needs too", "")
        if not settings.key_file:
            self._check_without_keys(endpoint)
            return None
        own = self._own
        try:
            return own, z85.decode(public_key(settings.server_key))
        except ValueError as error:
            raise SettingsError("bus.server_key", str(error), settings.server_key) from None

    @cached_property
    def _own(self) -> KeyPair:
        return load_key(self._settings.key_file)

    @cached_property
    def _allowed(self) -> AllowList:
        return AllowList(self._settings.allowed_keys)

    def _check_without_keys(self, endpoint: TcpEndpoint) -> None:
        if endpoint.is_loopback:
            return
        if not self._settings.insecure:
            reason = "beyond loopback it needs keys (bus.key_file), unless bus.insecure is true"
            raise AddressError(str(endpoint), reason)
        if not self._warned:
            self._warned = True
            _log.warning("bus without keys beyond loopback", address=str(endpoint), setting="bus.insecure")


def use_key(socket: "zmq.Socket[bytes]", own: KeyPair, listener: bytes = b"") -> None:
    """Set up CURVE on a socket; a connecting socket needs the public key of its listener."""
    if listener:
        socket.setsockopt(zmq.CURVE_SERVERKEY, listener)
    else:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
