"""The attackers, each for some seconds, in a process of its own: `python -m benchmarks.attacks.attackers NAME ...`.

They are the peers of tests/integration/attacks, which say what must hold under them; here they say what it costs.
"""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from tests.integration.attacks.peers import RANDOM, ClientPeer, Peer, Tcp, WorkerPeer, drawn, many
from tests.integration.attacks.scene import repeat
from tokenbus_contracts.generated.client_pb2 import ServerFrame

_MIB = 1 << 20


class Target(NamedTuple):
    """Where a system is attacked."""

    clients: str
    workers: str


def idle(_target: Target, seconds: float) -> None:
    """Do nothing: what a second stretch of the control comes to."""
    time.sleep(seconds)


def endless_message(target: Target, seconds: float) -> None:
    """Send parts of a message that never ends, before any hello."""

    def attack() -> None:
        """Send until cut off, and come again."""
        with Tcp(target.clients) as peer:
            ends = time.monotonic() + seconds
            peer.shake_hands()
            while time.monotonic() < ends and peer.part(b"\0" * _MIB, more=True):
                time.sleep(0.002)  # 500 MiB a second at most

    repeat(attack, seconds, 0.05)


def forged_worker(target: Target, seconds: float) -> None:
    """Say hello as the worker that serves, and declare all of its items lost."""
    with ClientPeer(target.clients) as spy:
        spy.hello()
        spy.watched("worker-0")
        epoch = spy.watched_epoch

    def attack() -> None:
        """Be it for a moment."""
        with WorkerPeer(target.workers, "worker-0", epoch, next_sequence=1 << 40) as forger:
            forger.greet()
            forger.gap(1, 1 << 40)
            forger.listen(0.1)

    repeat(attack, seconds, 0.05)


def hoarders(target: Target, seconds: float) -> None:
    """Come again and again, ask for 300 tokens, and acknowledge none."""
    with ExitStack() as stack:

        def attack() -> None:
            """Come one more."""
            peer = stack.enter_context(ClientPeer(target.clients))
            peer.hello()
            peer.ask(tokens=300)

        repeat(attack, seconds, 0.5)


def costly_resumes(target: Target, seconds: float) -> None:
    """Leave frames unacknowledged, and resume what they hold."""
    with ClientPeer(target.clients) as peer:
        peer.hello()
        keys = [peer.ask(tokens=60, top_logprobs=20) for _ in range(40)]
        for place, _ in enumerate(peer.frames(ServerFrame, 1.0)):
            if place > 100:  # noqa: PLR2004 - enough of them
                break
        repeat(lambda: peer.resume_all(keys * 5), max(0.0, seconds - 1), 0.1)


def vast_numbers(target: Target, seconds: float) -> None:
    """Say sequences at the end of their range from fourteen workers."""
    with ExitStack() as stack:
        peers = []
        for place in range(14):
            last = (1 << 62) - place
            peer = WorkerPeer(target.workers, f"vast-{place}", 7, first_sequence=last, next_sequence=last)
            peers.append(stack.enter_context(peer))
            peer.greet()

        def attack() -> None:
            """Be alive."""
            for peer in peers:
                peer.beat(1 << 62)

        repeat(attack, seconds, 0.2)


def silent_connections(target: Target, seconds: float) -> None:
    """Hold connections that have done the transport's handshake, and nothing else."""
    with many(lambda: Tcp(target.clients), 400) as peers:
        for peer in peers:
            peer.send(Tcp.GREETING)
        time.sleep(seconds)


def stolen_requests(target: Target, seconds: float) -> None:
    """Resume invented keys as fast as the table is worth."""
    with ClientPeer(target.clients) as peer:
        peer.hello()
        repeat(lambda: peer.resume_all(drawn() for _ in range(1000)), seconds, 0.05)


def unacknowledged_news(target: Target, seconds: float) -> None:
    """Cause refusals without end, and acknowledge none."""
    with ClientPeer(target.clients, window_frames=1) as peer:
        peer.hello()
        repeat(lambda: [peer.ask(5, 1, model="m" * 256) for _ in range(500)], seconds, 0.05)


def invented_rows(target: Target, seconds: float, workers: int = 1) -> None:
    """Publish rows for keys that no client asked for, under some worker ids."""
    with ExitStack() as stack:
        peers = [stack.enter_context(WorkerPeer(target.workers, f"evil-{place}", 7)) for place in range(workers)]
        for peer in peers:
            peer.hello()
        sequence = 0

        def attack() -> None:
            """Publish a step of each."""
            nonlocal sequence
            sequence += 1
            for peer in peers:
                peer.publish(sequence, sequence, [(drawn(), 0) for _ in range(512)])
                peer.beat(sequence)

        repeat(attack, seconds, 0.02)


def noise(target: Target, seconds: float) -> None:
    """Send what is no frame, to both addresses."""
    with Peer(target.clients) as client, Peer(target.workers) as worker:

        def attack() -> None:
            """Send some."""
            for _ in range(50):
                client.say(RANDOM.randbytes(64))
                worker.say(RANDOM.randbytes(64))

        repeat(attack, seconds, 0.02)


ATTACKS: dict[str, Callable[[Target, float], None]] = {
    "none": idle,
    "endless message": endless_message,
    "forged worker": forged_worker,
    "clients that acknowledge nothing": hoarders,
    "resumes of what waits": costly_resumes,
    "numbers at their ends": vast_numbers,
    "silent connections": silent_connections,
    "resumes of invented keys": stolen_requests,
    "refusals not acknowledged": unacknowledged_news,
    "rows of invented keys": invented_rows,
    "rows of invented keys under twelve ids": partial(invented_rows, workers=12),
    "frames that are none": noise,
}


if __name__ == "__main__":
    name, clients, workers, duration = sys.argv[1:]
    ATTACKS[name](Target(clients, workers), float(duration))
