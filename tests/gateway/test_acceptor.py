"""Acceptor: handshakes that are not over, and what becomes of them where there is no room."""

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, cast

from tests.in_process.builders import settings
from tests.support.waiting import soon, until
from tokenbus.gateway.acceptor import Acceptor
from tokenbus.gateway.gateway import Counts

_PLACES = 2


@contextmanager
def pairs(count: int) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    with ExitStack() as stack:
        made = [socket.socketpair() for _ in range(count)]
        for ends in made:
            for end in ends:
                end.setblocking(False)  # noqa: FBT003 - a name of the standard library's
                stack.enter_context(end)
        yield made


def _acceptor(places: int, *, connections: int = 0) -> Acceptor:
    gateway = SimpleNamespace(
        settings=settings({"gateway.max_connections": places - 1}),
        counts=Counts(),
        certificate=SimpleNamespace(context=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)),
        repeated_log=None,
    )
    return Acceptor(cast("Any", None), asyncio.Protocol, range(connections), cast("Any", gateway))


async def _ended(end: socket.socket) -> None:
    assert not await soon(asyncio.get_running_loop().sock_recv(end, 1))


async def test_oldest_handshakes_make_room() -> None:
    acceptor = _acceptor(_PLACES)
    with pairs(5) as made:
        for ours, _ in made[:2]:
            acceptor.begin(ours)
        await asyncio.sleep(0)  # these begin
        for ours, _ in made[2:]:
            acceptor.begin(ours)
        assert len(acceptor) == _PLACES
        assert made[2][0].fileno() == -1  # it had not begun: its file is free at once
        for _, theirs in made[:3]:
            await _ended(theirs)
        assert [ours.fileno() >= 0 for ours, _ in made[3:]] == [True, True]
        acceptor.stop()
        for _, theirs in made[3:]:
            await _ended(theirs)
        await until(lambda: not len(acceptor))


async def test_connection_is_closed_where_there_is_no_place() -> None:
    acceptor = _acceptor(2, connections=2)
    with pairs(1) as [(ours, theirs)]:
        acceptor.begin(ours)
        assert ours.fileno() == -1
        await _ended(theirs)
        assert len(acceptor) == 2
