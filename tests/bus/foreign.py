"""Peers that do not speak ZeroMQ."""

import socket
from collections.abc import Callable

from tokenbus.bus import Listener


def call(listener: Listener) -> socket.socket:
    host, port = listener.address.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)))


def sending(data: bytes) -> Callable[[Listener], socket.socket]:
    def connect(listener: Listener) -> socket.socket:
        stranger = call(listener)
        stranger.sendall(data)
        return stranger

    return connect
