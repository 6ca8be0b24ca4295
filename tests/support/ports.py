"""Ports for processes that a test is about to start."""

import socket
from contextlib import ExitStack


def reserved_port(cleanup: ExitStack) -> int:
    """Return a port on loopback; it is bound without listening until the cleanup: no other process gets it."""
    reserved = cleanup.enter_context(socket.socket())
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    port: int = reserved.getsockname()[1]
    return port


def free_ports(count: int) -> list[int]:
    """Return some ports that are free, as a processor that is to come back at them must have."""
    with ExitStack() as stack:
        return [reserved_port(stack) for _ in range(count)]
