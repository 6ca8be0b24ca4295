"""The peers' two halves: raw ZeroMQ, FastDeploy's pickle over ZeroMQ, and its struct through a System V queue."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import zmq

from benchmarks.bus.pair import Order, Received, Sent, Watch, send_all, step_at, steps_of
from benchmarks.codec.fastdeploy import Pickle, SysVStruct
from benchmarks.codec.ours import message_of
from benchmarks.codec.peer import Peer, Queues
from benchmarks.sysv import Queue
from benchmarks.workload import Step

_HIGH_WATER_MARK = 256
"""As many messages as Tokenbus gives credit for."""
_END = b""


def send_raw(_connection: Connection, order: Order) -> Sent:
    """Send Tokenbus's own messages, encoded beforehand."""
    messages = [message_of(step) for step in steps_of(order)]
    return _pushed(order, lambda number: messages[(number - 1) % len(messages)])


def receive_raw(connection: Connection, order: Order) -> Received:
    """Receive, and do nothing with it."""
    watch = Watch()
    with _bound(order, connection) as socket:
        while socket.recv() != _END:
            watch.note()
    return Received(watch.at, watch.cpu_ns, [])


def send_pickle(_connection: Connection, order: Order) -> Sent:
    """Slice, pickle and send."""
    steps = steps_of(order)
    return _pushed(order, lambda number: Pickle.dumped(step_at(steps, number)))


def receive_pickle(connection: Connection, order: Order) -> Received:
    """Receive, unpickle, and give each request its lists."""
    delivery = _Delivery(order, Pickle())
    with _bound(order, connection) as socket:
        while (message := socket.recv()) != _END:
            Pickle.loaded(message, delivery.step, delivery.queues)
            delivery.note()
    return delivery.received


def send_struct(_connection: Connection, order: Order) -> Sent:
    """Fill the struct and send it."""
    steps, peer = steps_of(order), SysVStruct(Queue(order.queue))
    watch = send_all(order, lambda number: peer.send(step_at(steps, number)))
    peer.send_end()
    return watch.sent


def receive_struct(connection: Connection, order: Order) -> Received:
    """Receive, copy to the output arrays, and give each request its lists."""
    peer = SysVStruct(Queue(order.queue))
    delivery = _Delivery(order, peer)
    connection.send("")
    while peer.receive(delivery.step, delivery.queues):
        delivery.note()
    return delivery.received


class _Delivery:
    """The requests' queues; each step is noted, and taken as the requests would."""

    def __init__(self, order: Order, peer: Peer) -> None:
        self._steps, self._peer = steps_of(order), peer
        self._watch = Watch()
        self.queues: Queues = {key: deque() for key in self._steps[0].keys}
        self._first: list[object] = []

    @property
    def step(self) -> Step:
        """What the next message is about: whose rows it has, the engine's own process knows."""
        return step_at(self._steps, self._watch.count + 1)

    def note(self) -> None:
        self._watch.note()
        if not self._first:
            self._first = [queue[0] for queue in self.queues.values()]
        for queue in self.queues.values():
            queue.clear()

    @property
    def received(self) -> Received:
        cpu_ns = self._watch.cpu_ns
        pairs = zip(self._first, self._steps[0].top_ks, strict=True)
        return Received(self._watch.at, cpu_ns, [self._peer.plain(one, k) for one, k in pairs])


def _pushed(order: Order, message: Callable[[int], bytes]) -> Sent:
    with _socket(zmq.PUSH) as socket:
        socket.connect(order.address)
        watch = send_all(order, lambda number: socket.send(message(number)))
        socket.send(_END)
    return watch.sent


@contextmanager
def _bound(order: Order, connection: Connection) -> Iterator["zmq.Socket[bytes]"]:
    with _socket(zmq.PULL) as socket:
        socket.bind(order.address)
        connection.send(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        yield socket


@contextmanager
def _socket(kind: int) -> Iterator["zmq.Socket[bytes]"]:
    """Yield a socket that waits for the other process, however long: the parent ends this one if that one fails."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.set_hwm(_HIGH_WATER_MARK)
        socket.linger = socket.rcvtimeo = socket.sndtimeo = -1
        yield socket
