"""Bus addresses: TCP endpoints and Unix socket paths."""

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path

import zmq

from tokenbus.bus.errors import AddressError

_TCP = re.compile(r"tcp://(?:\[(?P<literal>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+|\*)):(?P<port>\d{1,5}|\*)")
_MOST_PORT = 65535


@dataclass(frozen=True, slots=True)
class TcpEndpoint:
    """A TCP host and port; a listener may use host `*` for all interfaces and port 0 for any free port."""

    host: str
    port: int
    is_v6: bool = False

    @property
    def is_loopback(self) -> bool:
        """Whether the host is a loopback address: 127.0.0.0/8, ::1 or localhost."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if self.is_v6 else f"tcp://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class IpcEndpoint:
    """The path of a Unix socket."""

    path: Path

    def __str__(self) -> str:
        return f"ipc://{self.path}"


def parse(address: str) -> TcpEndpoint | IpcEndpoint:
    scheme, _, path = address.partition("://")
    if scheme == "ipc":
        # In libzmq, the names `*` and @NAME create no file, so every user of the machine may bind them.
        if not path or not path.isprintable() or path == "*" or path.startswith("@"):
            raise AddressError(address, "expected ipc://PATH")
        size = len(os.fsencode(path))
        if size > zmq.IPC_PATH_MAX_LEN:
            raise AddressError(address, f"a path of at most {zmq.IPC_PATH_MAX_LEN} bytes, got {size}")
        return IpcEndpoint(Path(path))
    if scheme != "tcp":
        raise AddressError(address, "expected tcp://HOST:PORT or ipc://PATH")
    match = _TCP.fullmatch(address)
    if match is None:
        raise AddressError(address, "expected tcp://HOST:PORT")
    port = 0 if match["port"] == "*" else int(match["port"])
    if port > _MOST_PORT:
        raise AddressError(address, f"a port of at most {_MOST_PORT}, got {port}")
    return TcpEndpoint(match["literal"] or match["host"], port, is_v6=match["literal"] is not None)


def parse_remote(address: str) -> TcpEndpoint | IpcEndpoint:
    """Parse an address to connect to; raises AddressError if the address is invalid."""
    endpoint = parse(address)
    if isinstance(endpoint, TcpEndpoint) and (endpoint.host == "*" or not endpoint.port):
        raise AddressError(address, "a host and a port are needed to connect")
    return endpoint
