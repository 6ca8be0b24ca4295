"""The peers' two halves: raw ZeroMQ, FastDeploy's pickle over ZeroMQ, and its struct through a System V queue."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from benchmarks.bus.orders import Order, Received, Sent, step_at, steps_of
from benchmarks.bus.pace import Watch, send_all, sent
from benchmarks.codec.fastdeploy_pickle import Pickle
from benchmarks.codec.fastdeploy_struct import SysVStruct
from benchmarks.codec.ours import message_of
from benchmarks.codec.peer import Peer, Queues
from benchmarks.sysv import Queue
from benchmarks.workload import Step

_HIGH_WATER_MARK = 256
"""As many messages as Tokenbus gives credit for."""
_END = b""

Tell = Callable[[str], None]
"""Called with the address once the receiver is there."""


def send_raw(order: Order) -> Sent:
    """Send Tokenbus's own messages, encoded beforehand."""
    messages = [message_of(step) for step in steps_of(order)]
    with _socket(zmq.PUSH) as socket:
        socket.connect(order.address)
        watch = send_all(order, lambda number: socket.send(messages[(number - 1) % len(messages)]))
        socket.send(_END)
    return sent(watch)


def receive_raw(order: Order, tell: Tell) -> Received:
    """Receive, and do nothing with it."""
    watch = Watch()
    with _bound(order, tell) as socket:
        while socket.recv() != _END:
            watch.note()
    return Received(watch.at, watch.cpu_ns, [])


def send_pickle(order: Order) -> Sent:
    """Slice, pickle and send."""
    steps, peer = steps_of(order), Pickle()
    with _socket(zmq.PUSH) as socket:
        socket.connect(order.address)
        watch = send_all(order, lambda number: socket.send(peer.dumped(step_at(steps, number))))
        socket.send(_END)
    return sent(watch)


def receive_pickle(order: Order, tell: Tell) -> Received:
    """Receive, unpickle, and give each request its lists."""
    peer, receiver = Pickle(), _Delivery(order)
    with _bound(order, tell) as socket:
        while (message := socket.recv()) != _END:
            peer.loaded(message, receiver.step, receiver.queues)
            receiver.delivered(peer)
    return receiver.received


def send_struct(order: Order) -> Sent:
    """Fill the struct and send it."""
    steps, peer = steps_of(order), SysVStruct(Queue(order.queue))
    watch = send_all(order, lambda number: _send_struct(peer, step_at(steps, number)))
    peer.send_end()
    return sent(watch)


def receive_struct(order: Order, tell: Tell) -> Received:
    """Receive, copy to the output arrays, and give each request its lists."""
    peer, receiver = SysVStruct(Queue(order.queue)), _Delivery(order)
    tell("")
    while peer.receive(receiver.step, receiver.queues):
        receiver.delivered(peer)
    return receiver.received


def _send_struct(peer: SysVStruct, step: Step) -> None:
    peer.send(step)


class _Delivery:
    """The requests' queues; what is delivered is noted, and taken as the requests would."""

    def __init__(self, order: Order) -> None:
        self._steps = steps_of(order)
        self._watch = Watch()
        self.queues: Queues = {key: deque() for key in self._steps[0].keys}
        self._first: list[list[object]] = []
        self._peer: Peer | None = None

    @property
    def step(self) -> Step:
        """What the next message is about: whose rows it has, the engine's own process knows."""
        return step_at(self._steps, self._watch.count + 1)

    def delivered(self, peer: Peer) -> None:
        self._watch.note()
        if self._peer is None:
            self._peer, self._first = peer, [list(queue) for queue in self.queues.values()]
        for queue in self.queues.values():
            queue.clear()

    @property
    def received(self) -> Received:
        cpu_ns = self._watch.cpu_ns
        shares = []
        if self._peer is not None:
            top_ks = self._steps[0].top_ks
            shares = [self._peer.plain(one, k) for (one,), k in zip(self._first, top_ks, strict=True)]
        return Received(self._watch.at, cpu_ns, shares)


@contextmanager
def _bound(order: Order, tell: Tell) -> Iterator["zmq.Socket[bytes]"]:
    with _socket(zmq.PULL) as socket:
        socket.bind(order.address)
        tell(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        yield socket


@contextmanager
def _socket(kind: int) -> Iterator["zmq.Socket[bytes]"]:
    """Yield a socket that waits for the other process, however long: the parent ends this one if that one fails."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.set_hwm(_HIGH_WATER_MARK)
        socket.linger = socket.rcvtimeo = socket.sndtimeo = -1
        yield socket
