"""Keys for tests over real sockets: a folder with a key for each name, and an allow-list."""

from dataclasses import replace
from pathlib import Path

import zmq
import zmq.auth

from tests.bus.harness import SETTINGS
from tokenbus.bus import Role
from tokenbus.bus.allow_list import AllowedKey, new_key, write_keys
from tokenbus.bus.keys import create_key
from tokenbus.settings import BusSettings

LISTENER = "listener"
QUICK = replace(SETTINGS, linger_ms=50)  # a socket whose peer was refused has something to send until the end


class Keyring:
    """A folder with keys, and the allow-list of the listener whose key is the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "keys"
        self.file = self.folder / "allowed.toml"
        self.make(LISTENER)
        self.allow()

    def make(self, name: str) -> str:
        public, _ = create_key(self.folder, name)
        return zmq.auth.load_certificate(public)[0].decode()

    def public(self, name: str) -> str:
        return zmq.auth.load_certificate(self.folder / f"{name}.key")[0].decode()

    def entry(self, name: str, *roles: Role, names: tuple[str, ...] = ("*",), owner: str = "") -> AllowedKey:
        return new_key(owner or name, self.public(name), roles or tuple(Role), names)

    def allow(self, *entries: AllowedKey) -> None:
        write_keys(self.file, entries)

    def listening(self, settings: BusSettings = QUICK) -> BusSettings:
        own = str(self.folder / f"{LISTENER}.key_secret")
        return replace(settings, key_file=own, allowed_keys=str(self.file))

    def connecting(self, name: str, server: str = LISTENER, settings: BusSettings = QUICK) -> BusSettings:
        own = str(self.folder / f"{name}.key_secret")
        return replace(settings, key_file=own, server_key=str(self.folder / f"{server}.key"))

    def prove(self, socket: "zmq.Socket[bytes]", name: str) -> None:
        public, secret = zmq.auth.load_certificate(self.folder / f"{name}.key_secret")
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public(LISTENER).encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret or b"")
