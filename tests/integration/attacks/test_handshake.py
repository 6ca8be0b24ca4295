"""Peers that have not proved anything: messages without end and connections without a word (findings 1 and 7)."""

import asyncio
import json
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.integration.asking import all_exact, ask
from tests.integration.attacks.peers import ClientPeer, Tcp, many
from tests.integration.attacks.scene import Scene, scene, variants
from tests.integration.deployment import Deployment
from tests.integration.inprocess import TCP
from tests.support.waiting import until
from tokenbus_contracts.generated.client_pb2 import ClientFrame
from tokenbus_services.client import Client
from tokenbus_services.processor import Processor

_MIB = 1 << 20
_MORE_MIB = 192
"""What the processor may take above what it had, whatever comes before the handshake."""
_SENT_MIB = 320
ADDRESSES = ("clients", "workers_address")
FEW_DESCRIPTORS = ("bash", "-c", 'ulimit -Sn 512; exec "$@"', "limited")


@pytest.mark.parametrize(
    ("address", "peers"),
    variants((ADDRESSES[0], 1), (ADDRESSES[1], 10), long=((ADDRESSES[0], 10), (ADDRESSES[1], 1))),
)
async def test_message_that_never_ends_is_not_held(deployment: Deployment, address: str, peers: int) -> None:
    """Parts of 1 MiB, each with "more" set, from a peer that never says hello, are not kept; the peer is cut off."""
    async with scene(deployment) as at:
        before = at.peak
        is_open = await asyncio.to_thread(_send_parts, getattr(at, address), peers, b"\0" * _MIB, _SENT_MIB)
        await at.victim.unharmed()
        assert at.peak - before < _MORE_MIB
        assert not is_open


def _send_parts(address: str, peers: int, part: bytes, count: int) -> bool:
    """Send parts of messages that never end, in turn; return whether any of the peers is still connected."""
    with many(lambda: Tcp(address), peers) as attackers:
        for attacker in attackers:
            assert attacker.shake_hands()
        is_open = [True] * len(attackers)
        for number in range(count):
            place = number % len(attackers)
            is_open[place] = is_open[place] and attackers[place].part(part, more=True)
        return any(is_open) and not all(attacker.is_closed_within(10) for attacker in attackers)


@pytest.mark.parametrize("address", variants("clients", long=("workers_address",)))
async def test_message_of_ever_more_tiny_parts_is_not_held(deployment: Deployment, address: str) -> None:
    """Four million parts of one byte are not kept: what each of them costs is more than what it carries."""
    async with scene(deployment) as at:
        before = at.peak

        def attack() -> None:
            """Send many at once."""
            with Tcp(getattr(at, address)) as attacker:
                assert attacker.shake_hands()
                for _ in range(1000):
                    if not attacker.send(b"\x01\x01x" * 4000):
                        return

        await asyncio.to_thread(attack)
        await at.victim.unharmed()
        assert at.peak - before < _MORE_MIB


def _serves(at: Scene) -> None:
    """Fail unless the processor's own page answers."""
    address = json.loads(at.processor.wait_for('"serving metrics"'))["address"]
    with urllib.request.urlopen(f"{address}/metrics", timeout=20) as answer:  # noqa: S310
        assert answer.status == 200


def _greet(peer: Tcp) -> None:
    peer.shake_hands()


def _say_nothing(_peer: Tcp) -> None:
    """Connect, and no more."""


def _begin(peer: Tcp) -> None:
    peer.send(Tcp.GREETING[:11])


@pytest.mark.parametrize(
    ("address", "manner"),
    variants(
        ("clients", _greet),
        long=[(address, manner) for address in ADDRESSES for manner in (_greet, _say_nothing, _begin)][1:],
    ),
)
async def test_silent_connections_use_up_no_descriptors(
    deployment: Deployment, address: str, manner: Callable[[Tcp], None]
) -> None:
    """With 300 silent connections a new client is served, and so is /metrics; the silent ones are closed in time."""
    async with scene(deployment, before=FEW_DESCRIPTORS, metrics__address="127.0.0.1:0") as at:
        with ExitStack() as stack:
            peers = await asyncio.to_thread(stack.enter_context, many(lambda: Tcp(getattr(at, address)), 300))

            def attack() -> None:
                for peer in peers[:150] if manner is _greet else peers:
                    manner(peer)

            await asyncio.to_thread(attack)
            await _new_client_is_served(at)
            await asyncio.to_thread(_serves, at)
            closed = [await asyncio.to_thread(peer.is_closed_within, 20) for peer in (peers[0], peers[75], peers[-1])]
            assert all(closed)
        await at.victim.unharmed()


async def _new_client_is_served(at: Scene) -> None:
    async with Client(at.deployment.settings(client__drain_timeout_ms=0)) as client:
        await all_exact(ask(client, 2, 60), 60)


async def test_welcomed_connections_keep_no_places(deployment: Deployment) -> None:
    """A peer that says hello under one session after another, and keeps each connection open, shuts nobody out."""
    places = {"bus__max_connections": 4, "clients__max_clients": 2, "processor__max_workers": 2}
    async with Processor(deployment.settings(**TCP, **places)) as processor:
        address, sessions = processor.clients_address, processor.clients.sessions
        with ExitStack() as stack, ClientPeer("tcp://127.0.0.1:1") as said:
            for session in range(1, 9):
                said._hello.session = session
                attacker = stack.enter_context(Tcp(address))
                assert await asyncio.to_thread(attacker.shake_hands)
                attacker.part(ClientFrame(hello=said._hello).SerializeToString(), more=False)
                await until(lambda session=session: session in sessions)  # type: ignore[misc]
            async with Client(deployment.settings(bus__clients_address=address, client__drain_timeout_ms=0)) as client:
                await until(lambda: client.is_connected)
