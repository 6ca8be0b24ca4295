"""ZeroMQ: many peers that connect at once are all let in, on the connections that they began."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import zmq

from tests.bus.harness import Bus
from tests.bus.keyed import Keyring
from tests.support.waiting import soon
from tokenbus.bus import Listener
from tokenbus.bus.addresses import parse_remote
from tokenbus.bus.keys import ProcessKeys, use_key
from tokenbus.open_files import room_for
from tokenbus.settings import BusSettings

Make = Callable[..., Bus]
_CROWD = 500


@contextmanager
def crowd(listener: Listener, settings: BusSettings, count: int) -> Iterator[Sequence["zmq.Socket[bytes]"]]:
    keys = ProcessKeys(settings).for_connection(parse_remote(listener.address))
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
    assert room_for(4 * _CROWD) == 4 * _CROWD  # both sides are this process: two files each, and one for their threads
    keyring = Keyring(tmp_path)
    keyring.make("peer")
    keyring.allow(keyring.entry("peer"))
    listener = await make("zeromq-tcp", keyring.listening()).listen()  # which fails the test for a peer that is refused
    with crowd(listener, keyring.connecting("peer"), _CROWD):
        await _admit(listener, _CROWD)
        assert listener.usage().admitted == _CROWD
        assert not sum(listener.usage().cut_off.values())
