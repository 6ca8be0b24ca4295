"""Acceptor: who takes a connection, handshakes that are not over, and what becomes of them where there is no room."""

import asyncio
import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from tests.services.builders import settings
from tests.support.waiting import soon, until
from tokenbus_services.gateway.acceptor import Acceptor
from tokenbus_services.gateway.gateway import Counts
from tokenbus_services.gateway.tallies import CONNECTIONS, SharedTallies, Tally

_PLACES = 2


@contextmanager
def pairs(count: int) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Return so many connections, each with both of its ends."""
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
    return Acceptor(cast("Any", None), asyncio.Protocol, range(connections), cast("Any", gateway), Tally())


def _joining(connections: list[object]) -> asyncio.Protocol:
    """Return a protocol that is one of the connections."""
    made = asyncio.Protocol()
    connections.append(made)
    return made


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


async def test_process_with_more_connections_lets_another_go_first() -> None:
    """Both are woken by the same connections: the one that has fewer takes as many as it takes at once."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        first = SharedTallies()
        all_tallies = [first, SharedTallies(os.dup(first.descriptor), 1)]
        acceptors = []
        for own, tallies in zip((5, 1), all_tallies, strict=True):
            stack.callback(tallies.close)
            gateway = SimpleNamespace(
                settings=settings({"gateway.processes": 2}), counts=Counts(), certificate=None, repeated_log=None
            )
            shared = listening.dup()
            shared.setblocking(False)  # noqa: FBT003 - a name of the standard library's
            open_ones: list[object] = [None] * own
            make = partial(_joining, open_ones)
            acceptor = Acceptor(shared, make, open_ones, cast("Any", gateway), tallies.of(CONNECTIONS))
            stack.callback(acceptor.stop)
            acceptor.tick()
            acceptors.append(acceptor)
        for _ in range(4):
            stack.enter_context(socket.create_connection(listening.getsockname()))
        for acceptor in acceptors:
            acceptor.start()
        await until(lambda: sum(map(len, acceptors)) == 10)
        assert [len(acceptor) for acceptor in acceptors] == [5, 5]
