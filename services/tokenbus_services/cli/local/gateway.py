"""Whether a gateway can run here, and where."""

import importlib.util
import socket
from random import SystemRandom

from tokenbus_services.cli.errors import WRONG_USE, CommandError
from tokenbus_services.settings import Settings
from tokenbus_services.settings.entries import ENTRIES

_HOST = "127.0.0.1"
_PORTS, _TRIES = range(20_000, 32_000), 16
"""Below what systems give to outgoing connections, one of which could take a port before its service listens there."""
_NEEDS = ("tokenbus_services.cli.gateway", "starlette", "uvicorn", "orjson")


def gateway_address(settings: Settings, port: int | None) -> str:
    """Return where a gateway is to serve, or nothing if none can run here; then a port must not be asked for."""
    lacking = gateway_lacks()
    if lacking:
        if port is not None:
            raise CommandError(f"--port: no gateway can run here, {lacking} is not installed", WRONG_USE)
        return ""
    return usable("gateway.address", settings.gateway.address) if port is None else f"{_HOST}:{port}"


def usable(key: str, address: str) -> str:
    """Return an address with a port that others can be told of: a default that is taken, and port 0, become free ones.

    What somebody chose stays as it is, and if it is taken, who wants to listen there says so.
    """
    is_open = address == ENTRIES[key].default or address.endswith(":0")
    return free_address(address) if is_open else address


def gateway_lacks() -> str:
    """Return the module without which no gateway can run here, or nothing."""
    return next((name for name in _NEEDS if importlib.util.find_spec(name) is None), "")


def free_address(wanted: str) -> str:
    """Return an address if its port is free, else one with another port of that host that is."""
    host, _, port = wanted.rpartition(":")
    wished = [int(port)] if int(port) else []
    for number in (*wished, *SystemRandom().sample(_PORTS, _TRIES), 0):
        try:
            with socket.create_server((host.strip("[]"), number)) as server:
                return f"{host}:{server.getsockname()[1]}"
        except OSError:
            continue
    return wanted  # its own process tells what is wrong with it
