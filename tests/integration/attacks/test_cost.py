"""Frames that cost the processor far more than their sender: work, arithmetic and memory (findings 4, 5 and 11)."""

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest

from tests.integration.asking import all_failed, ask, begun
from tests.integration.attacks.peers import ClientPeer, WorkerPeer, drawn, part, pour, request
from tests.integration.attacks.scene import Scene, repeat, scene, variants
from tests.integration.deployment import Deployment
from tests.support.waiting import MOST
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Confirm
from tokenbus_contracts.generated.request_pb2 import ErrorCode

_LARGEST = 1 << 62
"""The largest sequence that the schema allows."""
_WIDEST = (1 << 64) - 1
_QUEUE_BYTES = 1 << 24
"""What waits for a client at most, where frames fill it; the default is four times as much."""
_MOST_MIB = 512
"""What it may take above what it had while eight peers send as fast as they can, on a busy machine; unbounded it is
more than 1,000 after three seconds.
"""
_MORE_MIB = 192
"""What the processor may take above what it had: three times what waits for one client by default."""


def _say(peer: WorkerPeer, number: str, place: int) -> None:
    """Say a number at the end of its range."""
    match number:
        case "gap" | "gap without next":
            peer.gap(1, _LARGEST - place)
        case "widest gap":
            peer.gap(_WIDEST - 1, _WIDEST)
        case "item":
            peer.publish(_LARGEST, 1, [(5, 0)])
        case "heartbeat":
            peer.beat(_LARGEST)


def _numbers(at: Scene, number: str, places: int) -> None:
    """Say numbers at their ends from workers that are new, and be alive for a while."""
    with ExitStack() as stack:
        peers = []
        for place in range(places):
            value = _WIDEST if number == "widest hello" else _LARGEST - place
            fields: dict[str, Any] = {} if number == "gap without next" else {"next_sequence": value}
            if number in ("hello", "widest hello"):
                fields["first_sequence"] = value
            peer = stack.enter_context(WorkerPeer(at.workers_address, f"vast-{place}", 7 + place, **fields))
            peers.append(peer)
            peer.greet()
            _say(peer, number, place)

        def beat() -> None:
            for peer in peers:
                peer.beat(_LARGEST if number == "heartbeat" else 0)

        repeat(beat, 1.5, 0.2)


@pytest.mark.parametrize(
    ("number", "places"),
    variants(
        ("hello", 14),
        ("gap", 1),
        ("heartbeat", 14),
        long=[
            *((number, places) for number in ("widest hello", "gap without next", "widest gap") for places in (1, 14)),
            *(("item", 14), ("hello", 1), ("gap", 14), ("heartbeat", 1), ("item", 1)),
        ],
    ),
)
async def test_workers_numbers_at_their_ends_leave_supervision_on(
    deployment: Deployment, number: str, places: int
) -> None:
    """Sequences at the ends of their range end no tick: a worker that is killed afterwards is found to be lost."""
    async with scene(deployment, bus__heartbeat_timeout_ms=2000) as at:
        lost = ask(at.client, 4, None)
        await begun(lost)
        attack = asyncio.create_task(asyncio.to_thread(_numbers, at, number, places))
        await at.victim.is_served()
        at.victim.leave()
        at.workers[0].kill()
        await all_failed(lost, ErrorCode.ERROR_CODE_WORKER_LOST)
        await attack


async def test_clients_numbers_at_their_ends_harm_no_other(deployment: Deployment) -> None:
    """Windows, positions, deadlines and acknowledgements at their ends, and beyond, harm no other client."""
    async with scene(deployment) as at:

        def attack() -> None:
            for window in (1, 65_536, (1 << 32) - 1):
                with ClientPeer(at.clients, window_frames=window) as peer:
                    peer._hello.window_bytes = _WIDEST
                    peer.greet()
                    for number in (_LARGEST, _WIDEST):
                        peer.tell(ClientFrame(confirm=Confirm(through_number=number)))
                    for moment in (1, _LARGEST, _WIDEST):
                        key = peer.ask(tokens=30, deadline_ms=(1 << 32) - 1, deadline_unix_ms=moment)
                        peer.resume(key, (1 << 31) - 1, moment)
                        peer.resume(drawn(), (1 << 32) - 1, moment)
                    peer.listen(0.3)

        await asyncio.to_thread(repeat, attack, 1.0)
        await at.victim.unharmed()


@pytest.mark.parametrize("kind", variants("refusals", long=("damaged frames", "requests that end at once")))
async def test_news_that_is_not_acknowledged_is_bounded_by_its_size(deployment: Deployment, kind: str) -> None:
    """A client that asks for refusals without end, and acknowledges none, has no more memory than its bound allows."""
    async with scene(deployment, steps_per_second=1000, clients__send_queue_bytes=_QUEUE_BYTES) as at:
        before = at.peak

        def attack() -> None:
            """Cause an answer with each frame."""
            with ClientPeer(at.clients, window_frames=1) as peer:
                peer.hello()
                if kind == "requests that end at once":
                    message = [
                        ClientFrame(generate=request(number + 1, 1)).SerializeToString() for number in range(512)
                    ]
                elif kind == "refusals":
                    message = [ClientFrame(generate=request(5, 1, top_logprobs=100)).SerializeToString()]
                else:
                    message = [ClientFrame(generate=request(5, 1, handoff_address="m" * 257)).SerializeToString()]
                for number in range(2 * _QUEUE_BYTES // 1024 if kind != "requests that end at once" else 20_000):
                    peer.say(message[number % len(message)])
                    if not number % 512:
                        peer.beat()  # a damaged frame is no sign of life
                peer.read_out()

        await asyncio.to_thread(attack)
        await at.victim.unharmed()
        assert at.peak - before < _MORE_MIB
        evicted = '"slow client"' if kind == "requests that end at once" else " bytes unacknowledged"
        assert at.processor.lines(evicted)


@pytest.mark.parametrize("what", ["long prompts", "tiny parts"])
async def test_large_messages_of_unadmitted_peers_harm_no_other(deployment: Deployment, what: str) -> None:
    """Eight peers that never say hello, and send as they can, keep no client from its tokens, nor fill memory."""
    async with scene(deployment) as at:
        before = at.peak
        generate = request(0, 60)
        generate.tokens.token_ids.extend([1] * 300_000)
        long = part(ClientFrame(generate=generate).SerializeToString())
        if what == "long prompts":
            await asyncio.to_thread(pour, at.clients, long, 1.5)
        async with asyncio.timeout(MOST):
            while what == "tiny parts" and not at.processor.lines("for which this process grew by"):
                await asyncio.to_thread(pour, at.clients, b"\x01\0" * 5000, 1.5)  # few, on a busy machine
        await at.victim.unharmed()
        assert at.peak - before < _MOST_MIB
