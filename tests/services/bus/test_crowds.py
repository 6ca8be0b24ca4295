"""ZeroMQ: many peers that connect at once are all let in, on the connections that they began, beside silent ones."""

import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import zmq

from tests.services.bus.attackers import RawPeer, in_thread
from tests.services.bus.harness import SETTINGS, Bus
from tests.services.bus.keyed import Keyring
from tests.services.bus.test_bounds import TimedBus
from tests.support.waiting import soon, until
from tokenbus_services.bus import Listener
from tokenbus_services.bus.addresses import parse_remote
from tokenbus_services.bus.keys import ProcessKeys, use_key
from tokenbus_services.open_files import room_for
from tokenbus_services.settings import BusSettings

Make = Callable[..., Bus]
_CROWD = 500


@contextmanager
def crowd(listener: Listener, settings: BusSettings, count: int) -> Iterator[Sequence["zmq.Socket[bytes]"]]:
    keys = ProcessKeys(settings).for_connection(parse_remote(listener.address), None)
    assert keys is not None
    context = zmq.Context[zmq.Socket[bytes]]()
    context.set(zmq.MAX_SOCKETS, 2 * count)
    sockets = []
    try:
        for _ in range(count):
            sockets.append(context.socket(zmq.DEALER))
            sockets[-1].linger = 0
            sockets[-1].setsockopt(zmq.RECONNECT_IVL, -1)  # one that is cut off does not come again
            use_key(sockets[-1], *keys)
            sockets[-1].connect(listener.address)
            sockets[-1].send(b"hello")
        yield sockets
    finally:
        context.destroy()


async def _admit(listener: Listener, count: int) -> None:
    met: set[bytes] = set()
    while len(met) < count:
        peer, parts = await soon(listener.receive())
        assert parts == [b"hello"]
        listener.admit(peer)
        met.add(peer)


async def test_crowd_with_keys_is_admitted_whole(make: Make, tmp_path: Path) -> None:
    """500 peers that connect before the listener answers the first are all admitted, and none is cut off."""
    assert room_for(4 * _CROWD) == 4 * _CROWD  # both sides are this process: two files each, and one for their threads
    keyring = Keyring(tmp_path)
    keyring.make("peer")
    keyring.allow(keyring.entry("peer"))
    listener = await make("zeromq-tcp", keyring.listening()).listen()  # which fails the test for a peer that is refused
    with crowd(listener, keyring.connecting("peer"), _CROWD):
        await _admit(listener, _CROWD)
        assert listener.usage().admitted == _CROWD
        assert not sum(listener.usage().cut_off.values())


async def test_silent_connections_make_room_before_handshakes(make: Make) -> None:
    reasons: list[str] = []
    listener = await make("zeromq-tcp", replace(SETTINGS, max_connections=12)).listen(refused=reasons.append)
    with ExitStack() as stack:
        speaking = [stack.enter_context(await in_thread(RawPeer, listener.address)) for _ in range(4)]
        where = speaking[0].socket.getpeername()
        silent = [stack.enter_context(socket.create_connection(where)) for _ in range(8)]
        await until(lambda: listener.usage().unadmitted == 12)
        speaking += [stack.enter_context(await in_thread(RawPeer, listener.address)) for _ in range(8)]
        for each in silent:
            assert await in_thread(_has_ended, each)
        for peer in speaking:
            peer.part(b"hello")
        await _admit(listener, len(speaking))
    assert len(reasons) == len(silent)


def _has_ended(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


async def test_crowd_has_more_time_than_one(tmp_path: Path) -> None:
    async with TimedBus("tcp", tmp_path, replace(SETTINGS, introduction_timeout_ms=1000)) as bus:
        with ExitStack() as stack:
            peers = [stack.enter_context(await in_thread(RawPeer, bus.listener.address)) for _ in range(130)]
            silent = stack.enter_context(socket.create_connection(peers[0].socket.getpeername()))
            await until(lambda: bus.listener.usage().unadmitted == 131)
            bus.clock.advance(1.5)
            assert await in_thread(_has_ended, silent)
            for each in peers:
                each.part(b"hello")
            await until(lambda: bus.listener.usage().admitted == 131)
        await bus.good_goes_on()
    assert len(bus.reasons) == 1
    assert re.search("has not introduced itself within 1000 ms", bus.reasons[0])
