"""Clients that take without acknowledging, and peers that fill what all share (findings 3, 12 and 13)."""

import asyncio
from contextlib import ExitStack
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.asking import all_exact, ask
from tests.integration.attacks.peers import ClientPeer, WorkerPeer, drawn
from tests.integration.attacks.scene import repeat, scene, variants
from tests.integration.deployment import Deployment, Overrides
from tests.integration.inprocess import processing
from tests.integration.serving import served
from tests.integration.test_keys import keys_of, listening
from tests.services.bus.keyed import Keyring
from tests.support.waiting import MOST, until
from tokenbus_contracts.generated.client_pb2 import ServerFrame
from tokenbus_contracts.generated.request_pb2 import ErrorCode
from tokenbus_contracts.generated.stream_pb2 import ProcessorFrame
from tokenbus_services.client import Client

_SLOW = ErrorCode.ERROR_CODE_SLOW_CLIENT
SMALL_TABLE: Overrides = {"processor__max_requests": 4096, "processor__requests_per_peer": 512}
LITTLE_ROOM: Overrides = {"processor__pending_items": 256}
"""What may wait for consumers is full in a second."""


@pytest.mark.parametrize("manner", variants("silent", "all but the first", long=("alive", "reads nothing")))
async def test_clients_that_acknowledge_nothing_stall_nobody_else(deployment: Deployment, manner: str) -> None:
    """Clients that ask for a request each and acknowledge nothing, or not the oldest, keep no other one waiting."""
    async with scene(deployment, **LITTLE_ROOM) as at:

        def attack() -> None:
            """Come, ask, and leave one's tokens; the connections stay until all have come."""
            with ExitStack() as stack:
                peers: list[ClientPeer] = []

                def one() -> None:
                    peer = stack.enter_context(ClientPeer(at.clients, window_frames=65_536))
                    peers.append(peer)
                    peer.greet()
                    if manner != "reads nothing":
                        peer.heard("welcome")
                    peer.ask(tokens=300)
                    for each in peers:
                        if manner != "silent":
                            each.beat()
                        if manner == "all but the first":
                            each.ask(tokens=30)

                repeat(one, 2.5, 0.1)

        await asyncio.to_thread(attack)
        await at.victim.unharmed()


async def test_ten_clients_that_acknowledge_nothing_lose_their_own_requests(deployment: Deployment) -> None:
    """Ten clients that ask on and on lose their own requests as slow clients, while another client gets every token."""
    async with scene(deployment, **LITTLE_ROOM) as at:

        def attack() -> None:
            """Ask from ten sides at once, and look at what was said at the end."""
            with ExitStack() as stack:
                peers = [stack.enter_context(ClientPeer(at.clients, name=f"hoarder-{place}")) for place in range(10)]
                for peer in peers:
                    peer.hello()

                def ask() -> None:
                    for peer in peers:
                        peer.ask(tokens=100_000, top_logprobs=20)
                        peer.beat()

                while not (slow := at.processor.lines('"slow client"')):  # however slow the machine is
                    repeat(ask, 1.0, 0.25)
                evicted = next(peer for place, peer in enumerate(peers) if f'"hoarder-{place}"' in slow[0])
                assert any(frame.error.code == _SLOW for frame, _ in evicted.frames(ServerFrame))

        async with asyncio.timeout(MOST):
            await asyncio.to_thread(attack)
        await at.victim.unharmed()
        slow = at.processor.lines('"slow client"')
    assert [line for line in slow if '"client":"hoarder-' not in line] == []


async def test_client_that_crashes_and_comes_back_stalls_nobody_else(deployment: Deployment) -> None:
    """A client that crashes with tokens on their way, again and again, each life a session, keeps no other waiting."""
    async with scene(deployment, **LITTLE_ROOM) as at:

        def attack() -> None:
            with ClientPeer(at.clients, name="crashing") as life:
                life.hello()
                life.ask(tokens=300)
                life.heard("outputs")

        await asyncio.to_thread(repeat, attack, 2.5, 0.1)
        await at.victim.unharmed()


async def test_clients_that_acknowledge_nothing_before_a_restart_stall_nobody_after(deployment: Deployment) -> None:
    """What clients left unacknowledged when the processor was killed keeps no other client waiting at the next one."""
    async with scene(deployment, **LITTLE_ROOM) as at:

        def attack() -> None:
            """Ask before and after the processor is killed."""
            with ExitStack() as stack:
                for life in range(2):
                    for _ in range(16):
                        peer = stack.enter_context(ClientPeer(at.clients))
                        peer.hello()
                        peer.ask(tokens=600)
                    if not life:
                        at.restart()

        await asyncio.to_thread(attack)
        await at.victim.unharmed()


@pytest.mark.parametrize("workers", variants(1, long=(10,)))
async def test_rows_that_no_client_asked_for_fill_no_table(deployment: Deployment, workers: int) -> None:
    """Workers that publish rows of more invented keys than a table has places leave room for other peers' requests."""
    async with scene(deployment, **SMALL_TABLE) as at:

        def attack() -> None:
            """Publish rows of keys that no client knows."""
            with ExitStack() as stack:
                for place in range(workers):
                    peer = stack.enter_context(WorkerPeer(at.workers_address, f"evil-{place}", 7))
                    peer.hello()
                    for sequence in range(1, 1 + 10 // workers):
                        keys = [drawn() for _ in range(512)]
                        peer.publish(sequence, sequence, [(key, 0) for key in keys])
                    peer.beat()
                peer.heard("ack")

        await asyncio.to_thread(attack)
        await at.victim.unharmed()


@pytest.mark.parametrize("begins", [0, 5])
async def test_invented_rows_are_charged_to_their_key(deployment: Deployment, tmp_path: Path, begins: int) -> None:
    """A key that brings invented requests under twelve worker ids has as many of them open as one id may have.

    What it brings beyond that waits, and gets no more credit; what begins nowhere is answered with a few aborts a step.
    Another client gets every token meanwhile.
    """
    keyring = Keyring(tmp_path)
    for name in ("evil", "worker-0", "client"):
        keyring.make(name)
    keyring.allow(*(keyring.entry(name) for name in ("evil", "worker-0", "client")))
    limits: Overrides = {
        "processor__requests_per_peer": 64,
        "processor__unclaimed_timeout_ms": 600_000,
        "processor__credit_items": 4,
    }
    async with processing(deployment, **listening(keyring), **limits) as (processor, found):
        addresses: dict[str, Any] = dict(found)
        registry, by_id = processor.registry, processor.workers.by_id

        def attack(stack: ExitStack) -> list[WorkerPeer]:
            """Bring 512 requests under each of twelve ids."""
            peers = []
            for place in range(12):
                address = str(addresses["bus__workers_address"])
                peer = WorkerPeer(address, f"evil-{place}", 7, prove=partial(keyring.prove, name="evil"))
                peers.append(stack.enter_context(peer))
                peer.hello()
                peer.publish(1, 1, [(drawn(), begins) for _ in range(512)])
            return peers

        with ExitStack() as stack:
            peers = await asyncio.to_thread(attack, stack)
            await until(lambda: sum(worker.stream.counts.items for worker in by_id.values()) == 12)
            brought = len(registry.table)
            granted = sorted(worker.stream.credit.through_sequence for worker in by_id.values())
            aborts = [await asyncio.to_thread(_aborts, peer) for peer in peers]
            worker = {**addresses, **keys_of(keyring, "worker-0")}
            await asyncio.to_thread(deployment.start_worker, "worker-0", **worker)
            chosen = deployment.settings(**addresses, **keys_of(keyring, "client"), client__drain_timeout_ms=0)
            async with Client(chosen) as client:
                await all_exact(ask(client, 16, 61), 61)
    assert brought == (0 if begins else 64)
    assert sorted(aborts) == ([16] * 12 if begins else [0] * 11 + [16])
    assert granted == ([5] * 12 if begins else [4] * 11 + [5])


def _aborts(peer: WorkerPeer) -> int:
    """Return how many requests a worker was asked to end, up to the answer to a second hello."""
    peer._hello.next_sequence = 2
    peer.greet()
    bodies = (frame.WhichOneof("body") for frame, _ in peer.frames(ProcessorFrame))
    return list(takewhile(lambda body: body != "welcome", bodies)).count("abort")


@pytest.mark.parametrize("every", variants(0.0, long=(0.5,)))
async def test_keys_of_a_hello_fill_no_table(deployment: Deployment, every: float) -> None:
    """A hello that names 65,536 invented keys, again and again with others, leaves room for other peers' requests."""
    async with scene(deployment, **SMALL_TABLE) as at:

        def attack() -> None:
            """Claim to have requests that no client knows."""
            with WorkerPeer(at.workers_address, "evil", drawn()) as peer:
                peer._hello.request_keys.extend({drawn() for _ in range(65_536)})
                peer.hello()
                peer.leave()
                peer.listen(0.05)

        await asyncio.to_thread(repeat, attack, 2.0, every)
        await at.victim.unharmed()


@pytest.mark.parametrize("clients", variants(10, long=(1,)))
async def test_resumes_of_invented_keys_fill_no_table(deployment: Deployment, clients: int) -> None:
    """Clients that resume more requests that never were than the table has places leave room for other clients'."""
    async with scene(deployment, **SMALL_TABLE) as at:

        def attack() -> None:
            with ExitStack() as stack:
                peers = [stack.enter_context(ClientPeer(at.clients)) for _ in range(clients)]
                for peer in peers:
                    peer.hello()
                    for _ in range(5000 // clients):
                        peer.resume(drawn())
                for peer in peers:
                    peer.read_out()

        await asyncio.to_thread(attack)
        await at.victim.unharmed()


async def _unread(url: str, count: int, body: bytes) -> list[asyncio.StreamWriter]:
    """Open streams that are not read, each in a connection of its own."""
    address = httpx.URL(url)
    writers = []
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.host}:{address.port}\r\nContent-Type: application/json\r\n"
    for _ in range(count):
        reader, writer = await asyncio.open_connection(address.host, address.port, limit=1024)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        writers.append(writer)
    return writers


@pytest.mark.parametrize("streams", variants(50, long=(20, 200)))
async def test_stream_that_is_not_read_ends_alone(streams: int) -> None:
    """Streams that are not read end, or wait, alone: a client that reads at the same gateway gets every token."""
    body = b'{"model": "tokenbus", "prompt": [1], "max_tokens": 20000, "logprobs": 5, "stream": true}'
    with served() as system:
        system.deployment.start_worker("worker-0", "--steps-per-second", "1000", worker__max_requests=1024)
        writers = await _unread(system.url, streams, body)
        try:
            async with httpx.AsyncClient(base_url=system.url, timeout=60) as reader:
                for _ in range(6):
                    answer = await reader.post(
                        "/v1/completions", json={"model": "tokenbus", "prompt": [1], "max_tokens": 60, "logprobs": 1}
                    )
                    assert answer.status_code == 200, answer.text
                    choice = answer.json()["choices"][0]
                    assert len(choice["logprobs"]["tokens"]) == 60, choice
        finally:
            for writer in writers:
                writer.transport.abort()
