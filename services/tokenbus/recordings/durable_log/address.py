"""LogAddress: the NATS servers that keep a log, and its name there."""

import re
from dataclasses import dataclass

from tokenbus.bus import AddressError
from tokenbus.bus.addresses import TcpEndpoint, parse_remote
from tokenbus.settings import Settings

_ADDRESS = re.compile(r"(?P<scheme>nats|tls)://(?P<servers>[^/]+)/(?P<name>[A-Za-z0-9][A-Za-z0-9_-]{0,63})")
_MOST_SERVERS = 16


@dataclass(frozen=True, slots=True)
class LogAddress:
    """The servers of a cluster, any of which will do, and the name of a log there."""

    servers: tuple[TcpEndpoint, ...]
    name: str
    is_tls: bool


def parse(address: str, settings: Settings) -> LogAddress:
    """Return the parts of an address; raises AddressError for one that is invalid, or not safe enough to be used."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise AddressError(address, "expected nats://HOST:PORT/NAME or tls://..., NAME of letters, digits, _ and -")
    listed = match["servers"].split(",")
    if len(listed) > _MOST_SERVERS:
        raise AddressError(address, f"at most {_MOST_SERVERS} servers, got {len(listed)}")
    try:
        endpoints = [parse_remote(f"tcp://{each}") for each in listed]
    except AddressError:
        raise AddressError(address, "each server needs a host and a port") from None
    servers = tuple(each for each in endpoints if isinstance(each, TcpEndpoint))
    is_tls = match["scheme"] == "tls"
    is_near = all(server.is_loopback for server in servers)
    is_safe = is_tls and (settings.durable_log.credentials or settings.durable_log.certificate)
    if not (is_near or is_safe or settings.bus.insecure):
        reason = (
            "beyond loopback it needs tls:// and durable_log.credentials or durable_log.certificate, "
            "unless bus.insecure is true"
        )
        raise AddressError(address, reason)
    return LogAddress(servers, match["name"], is_tls)
