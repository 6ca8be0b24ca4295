"""Frames that cost the processor far more than their sender: work, arithmetic and memory (findings 4, 5 and 11)."""

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest

from tests.integration.asking import all_failed, ask, begun
from tests.integration.attacks.peers import RANDOM, ClientPeer, Peer, WorkerPeer, drawn, part, pour, request
from tests.integration.attacks.scene import Scene, repeat, scene, variants
from tests.integration.deployment import Deployment
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Confirm, ServerFrame
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


def _leave_frames(peer: ClientPeer, count: int = 800) -> list[int]:
    """Let a peer leave frames unacknowledged, and return the keys of its requests that have ended."""
    peer.hello()
    keys = [peer.ask(tokens=3 * count // 40, top_logprobs=20) for _ in range(40)]
    frames = 0
    for frame, _ in peer.frames(ServerFrame, 1.0):
        frames += frame.HasField("outputs")
        if frames >= count:
            break
    return keys


@pytest.mark.parametrize(
    ("frame", "peers"), variants(("resume", 1), ("generate", 1), long=(("resume", 5), ("generate", 5)))
)
async def test_frames_of_ended_requests_cost_no_decoding(deployment: Deployment, frame: str, peers: int) -> None:
    """2,000 resumes of ended requests, or requests anew of their keys, keep no other client from its tokens."""
    async with scene(deployment, steps_per_second=1000) as at:

        def attack() -> None:
            """Leave frames unacknowledged, and ask for what they hold."""
            with ExitStack() as stack:
                hoarders = [stack.enter_context(ClientPeer(at.clients)) for _ in range(peers)]
                keys = {hoarder: _leave_frames(hoarder) for hoarder in hoarders}
                for number in range(2000):
                    hoarder = hoarders[number % peers]
                    key = keys[hoarder][number % len(keys[hoarder])]
                    if frame == "resume":
                        hoarder.resume(key, number % 60)
                    else:
                        hoarder.tell(ClientFrame(generate=request(key, 60)))
                for hoarder in hoarders:
                    hoarder.read_out()

        await asyncio.to_thread(attack)
        await at.victim.unharmed()


async def test_resumes_at_a_trickle_cost_no_decoding(deployment: Deployment) -> None:
    """A few resumes at a time beside frames that are left unacknowledged keep no other client from its tokens."""
    async with scene(deployment, steps_per_second=1000) as at:

        def attack() -> None:
            """Resume a hundred a tick, each in a moment of its own."""
            with ClientPeer(at.clients) as hoarder:
                keys = _leave_frames(hoarder)
                repeat(lambda: hoarder.resume_all(keys), 2.0, 0.05)

        await asyncio.to_thread(attack)
        await at.victim.unharmed()


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
        await asyncio.to_thread(pour, at.clients, long if what == "long prompts" else b"\x01\0" * 5000, 1.5)
        await at.victim.unharmed()
        assert what == "long prompts" or at.processor.lines("for which this process grew by")
        assert at.peak - before < _MOST_MIB


async def test_refused_frames_harm_no_other(deployment: Deployment) -> None:
    """Frames that are not this protocol, from ten peers as fast as they can, keep no other client from its tokens."""
    async with scene(deployment) as at:

        def attack() -> None:
            with ExitStack() as stack:
                addresses = [at.clients, at.workers_address] * 5
                peers = [stack.enter_context(Peer(address)) for address in addresses]
                for _ in range(1000):
                    for peer in peers:
                        peer.say(RANDOM.randbytes(64))
                peers[0].listen(1)

        await asyncio.to_thread(attack)
        await at.victim.unharmed()
