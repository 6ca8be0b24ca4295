"""A user of a NATS server that publishes as fast as it can, at subjects at which the server lets it."""

import contextlib
import json
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.waiting import MOST
from tokenbus_services.bus.nats_conversation import HELLO, WELCOME, Frame, Kind

_BLOCK = 300


def permissions(workers: Sequence[str], clients: Sequence[str]) -> str:
    """Return users as docs/security.md has them: each may speak as itself alone, and has its name for a password."""
    users = [
        '{ user: processor, password: processor, permissions: { publish: "tokenbus.>", subscribe: "tokenbus.>" } }'
    ]
    for kind, roles, names in (("workers", "worker", workers), ("clients", "client", clients)):
        users += [
            f"{{ user: {name}, password: {name}, permissions: {{"
            f' publish: ["tokenbus.{kind}.who", "tokenbus.{kind}.*.up.{roles}.{name}.*"],'
            f' subscribe: ["tokenbus.{kind}.*.here", "tokenbus.{kind}.*.down.{name}.*"] }} }}'
            for name in names
        ]
    return "authorization: { users: [" + "\n".join(users) + "] }\n"


def login(folder: Path, user: str, roles: str = "") -> dict[str, Any]:
    """Return the settings of a process that is one of those users."""
    path = folder / user
    path.write_text(f"{user}:{user}")
    path.chmod(0o600)
    return {"bus__nats_credentials": str(path), "bus__nats_roles": roles}


class Flood:
    """Floods a listener from a thread, until it is left."""

    def __init__(self, port: int, user: str, roles: str, listener: str, kind: str) -> None:
        self._port, self._user, self._kind = port, user, kind
        self._up = f"tokenbus.{listener}.up.{roles}.{user}."
        self._down = f"tokenbus.{listener}.down.{user}."
        self._who = f"tokenbus.{listener.partition('.')[0]}.who"
        self._thread = threading.Thread(target=self._run)
        self._is_over = False
        self.began = threading.Event()
        """Set once hundreds of messages have been sent."""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self.began.wait(MOST)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        self._thread.join(MOST)

    def _run(self) -> None:
        while not self._is_over:
            with contextlib.suppress(OSError), self._connected() as connection:  # the server may cut it off
                self._flood(connection)

    def _connected(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self._port))
        login = {"user": self._user, "pass": self._user, "verbose": False, "headers": True, "no_responders": True}
        connection.sendall(f"CONNECT {json.dumps(login)}\r\nPING\r\n".encode())
        return connection

    def _flood(self, connection: socket.socket) -> None:
        own = secrets.token_hex(16)
        if self._kind in AFTER:
            self._greet(connection, own)
        threading.Thread(target=_read, args=(connection,), daemon=True).start()
        if self._kind in BEFORE:
            block = b"".join(_published(self._subject(), BEFORE[self._kind]()) for _ in range(_BLOCK))
            while not self._is_over:
                connection.sendall(block)
                self.began.set()
        else:
            make = AFTER[self._kind]
            frames = (_published(self._up + own, make(number)) for number in range(1, 2 * _BLOCK))
            connection.sendall(b"".join(frames))
            self.began.set()

    def _subject(self) -> str:
        if self._kind == "questions":
            return self._who
        return self._up + ("hello" if self._kind.endswith("new hellos") else secrets.token_hex(16))

    def _greet(self, connection: socket.socket, own: str) -> None:
        """Say hello until there is a welcome, or for a while: this name may not be welcome just now."""
        connection.settimeout(0.05)
        connection.sendall(f"SUB {self._down}{own} 1\r\n".encode())
        heard = b""
        for _ in range(20):
            connection.sendall(_published(self._up + "hello", HELLO + own.encode()))
            try:
                heard += connection.recv(65_536)
            except TimeoutError:
                continue
            if WELCOME in heard or self._is_over:
                break
        connection.settimeout(MOST)


def _read(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connection.recv(65_536):
            pass


def _published(subject: str, payload: bytes, reply: str = "") -> bytes:
    return f"PUB {subject} {reply} {len(payload)}\r\n".encode() + payload + b"\r\n"


BEFORE: dict[str, Callable[[], bytes]] = {
    "new hellos": lambda: HELLO + secrets.token_hex(16).encode(),
    "large new hellos": lambda: HELLO + bytes(300_000),
    "hellos": lambda: HELLO,
    "empty frames": lambda: b"",
    "large frames": lambda: bytes(300_000),
    "random bytes": lambda: secrets.token_bytes(100),
    "questions": lambda: b"",
}
"""What is said without a welcome."""
AFTER: dict[str, Callable[[int], bytes]] = {
    "random bytes after the welcome": lambda _: secrets.token_bytes(100),
    "frames that say nothing": lambda number: Frame(Kind.READ, number, 0).packed(),
    "a message in tiny parts": lambda number: Frame(Kind.MORE, number, 0, b"x").packed(),
    "a message that never ends": lambda number: Frame(Kind.MORE, number, 0, bytes(300_000)).packed(),
    "messages that are none": lambda number: Frame(Kind.LAST, number, 0, bytes(8)).packed(),
}
"""What is said once the listener has welcomed a peer, each time by another one of the user."""
