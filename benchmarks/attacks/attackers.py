"""The attackers, each for some seconds.

They are the peers of tests/integration/attacks, which say what must hold under them; here they say what it costs.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from benchmarks.attacks.systems import System, Target, at_gateway, over_nats, over_tcp, with_keys
from tests.integration.attacks.floods import Flood
from tests.integration.attacks.peers import RANDOM, ClientPeer, Peer, Tcp, WorkerPeer, drawn, many, part, pour, request
from tests.integration.attacks.scene import repeat
from tokenbus_contracts.generated.client_pb2 import ClientFrame, ServerFrame

_MIB = 1 << 20


Attack = Callable[[Target, float], None]


def attack_for(connection: Connection, how: Attack, target: Target, seconds: float) -> None:
    """Say that an attack begins, and run it."""
    connection.send("begins")
    how(target, seconds)


def idle(_target: Target, seconds: float) -> None:
    """Do nothing: this row is the control measured twice."""
    time.sleep(seconds)


def endless_message(target: Target, seconds: float) -> None:
    """Send parts of a message that never ends, before any hello."""

    def attack() -> None:
        with Tcp(target.clients) as peer:
            ends = time.monotonic() + seconds
            peer.shake_hands()
            while time.monotonic() < ends and peer.part(b"\0" * _MIB, more=True):
                time.sleep(0.002)  # 500 MiB a second at most

    repeat(attack, seconds, 0.05)


def unadmitted_requests(target: Target, seconds: float) -> None:
    """Ask for prompts of 300,000 ids from sixteen connections, without a hello, as fast as they go."""
    generate = request(0, 60)
    generate.tokens.token_ids.extend([1] * 300_000)
    pour(target.clients, part(ClientFrame(generate=generate).SerializeToString()), seconds, 16)


def tiny_parts(target: Target, seconds: float) -> None:
    """Send messages of ever more empty parts from eight connections."""
    pour(target.clients, b"\x01\0" * 5000, seconds)


def forged_worker(target: Target, seconds: float) -> None:
    """Say hello as the worker that serves, and declare all of its items lost."""
    with ClientPeer(target.clients) as spy:
        spy.hello()
        spy.watched("worker-0")
        epoch = spy.watched_epoch

    def attack() -> None:
        with WorkerPeer(target.workers, "worker-0", epoch, next_sequence=1 << 40) as forger:
            forger.greet()
            forger.gap(1, 1 << 40)
            forger.listen(0.1)

    repeat(attack, seconds, 0.05)


def hoarders(target: Target, seconds: float) -> None:
    """Come again and again, ask for 300 tokens, and acknowledge none."""
    with ExitStack() as stack:

        def attack() -> None:
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
            for peer in peers:
                peer.beat(1 << 62)

        repeat(attack, seconds, 0.2)


def silent_connections(target: Target, seconds: float) -> None:
    """Hold 400 connections that send the transport's greeting, and nothing else."""
    with many(lambda: Tcp(target.clients), 400) as peers:
        for peer in peers:
            peer.send(Tcp.GREETING)
        time.sleep(seconds)


def invented_resumes(target: Target, seconds: float) -> None:
    """Resume invented keys, 1000 at a time."""
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
        peers = [WorkerPeer(target.workers, f"evil-{place}", 7, prove=target.prove) for place in range(workers)]
        for peer in peers:
            stack.enter_context(peer).hello()
        sequence = 0

        def attack() -> None:
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
            for _ in range(50):
                client.say(RANDOM.randbytes(64))
                worker.say(RANDOM.randbytes(64))

        repeat(attack, seconds, 0.02)


def flood(target: Target, seconds: float, kind: str) -> None:
    """Flood the workers' listener over NATS, as a user that may be a worker."""
    with Flood(target.nats_port, "attacker", "worker", "workers.p", kind):
        time.sleep(seconds)


def costly_bodies(target: Target, seconds: float, path: str, body: dict[str, Any], at_once: int = 4) -> None:
    """Send a body again and again, some at once."""
    ends = time.monotonic() + seconds

    def attack() -> None:
        with httpx.Client(base_url=target.url) as client:
            while (left := ends - time.monotonic()) > 0:
                with suppress(httpx.HTTPError):
                    client.post(path, json={"model": "tokenbus", **body}, timeout=left)

    with ThreadPoolExecutor(at_once) as threads:
        for _ in range(at_once):
            threads.submit(attack)


_CHAT = [{"role": "user", "content": "a"}]
_WORK = {"messages": _CHAT, "chat_template_kwargs": {"work": list(range(1000))}}
ATTACKS: dict[str, tuple[Callable[[Path], AbstractAsyncContextManager[System]], Attack]] = {
    "none": (over_tcp, idle),
    "endless message": (over_tcp, endless_message),
    "messages of tiny parts": (over_tcp, tiny_parts),
    "large requests of unadmitted peers": (over_tcp, unadmitted_requests),
    "forged worker": (over_tcp, forged_worker),
    "clients that acknowledge nothing": (over_tcp, hoarders),
    "resumes of what waits": (over_tcp, costly_resumes),
    "numbers at their ends": (over_tcp, vast_numbers),
    "silent connections": (over_tcp, silent_connections),
    "resumes of invented keys": (over_tcp, invented_resumes),
    "refusals not acknowledged": (over_tcp, unacknowledged_news),
    "rows of invented keys": (over_tcp, invented_rows),
    "frames that are none": (over_tcp, noise),
    "rows of invented keys under twelve ids of one key": (with_keys, partial(invented_rows, workers=12)),
    "over NATS: new hellos": (over_nats, partial(flood, kind="new hellos")),
    "over NATS: empty frames": (over_nats, partial(flood, kind="empty frames")),
    "over NATS: large frames": (over_nats, partial(flood, kind="large frames")),
    "over NATS: a message that never ends": (over_nats, partial(flood, kind="a message that never ends")),
    "texts of a template without end": (at_gateway, partial(costly_bodies, path="/tokenize", body=_WORK)),
    "texts of 1 MB": (at_gateway, partial(costly_bodies, path="/tokenize", body={"prompt": "a" * 1_000_000})),
    "texts of 4 MB": (at_gateway, partial(costly_bodies, path="/tokenize", body={"prompt": "a" * 4_000_000})),
    "prompts of 100,000 token ids": (
        at_gateway,
        partial(costly_bodies, path="/v1/completions", body={"prompt": [5] * 100_000, "max_tokens": 1}),
    ),
}
"""Each attack, and on what."""
