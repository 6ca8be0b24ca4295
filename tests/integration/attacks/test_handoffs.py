"""Forged hand-offs: none is taken without a decode worker's ticket, and no state ends a worker (finding 8)."""

import asyncio
from contextlib import ExitStack

import pytest

from tests.integration.attacks.peers import RANDOM, ClientPeer, Peer, Tcp, WorkerPeer, handoff, request
from tests.integration.attacks.scene import Scene, peak_mib, repeat, scene, variants
from tests.integration.deployment import Deployment
from tokenbus_contracts.generated.handoff_pb2 import DecodeFrame
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_contracts.generated.stream_pb2 import WorkerRole

WORKERS = ("prefill-0", "decode-0")
STATES = {
    "a vast position": b"\xff" * 8,
    "beyond its end": (1 << 31).to_bytes(8, "little"),
    "at its end": (60).to_bytes(8, "little"),
    "too short": b"\0" * 7,
    "too long": b"\0" * 4096,
}


def _decode_address(at: Scene) -> str:
    with ClientPeer(at.clients) as spy:
        spy.hello()
        return spy.watched("decode-0").handoff_address


async def _is_alive(at: Scene) -> None:
    """Fail unless all requests go on at the same decode worker."""
    await at.victim.unharmed()
    for worker in at.workers:
        assert worker.is_running, worker.output


@pytest.mark.parametrize(
    ("state", "ticket"),
    variants(
        ("a vast position", b""),
        ("beyond its end", b"x" * 32),
        long=[(state, ticket) for state in STATES for ticket in (b"", b"x" * 32)],
    ),
)
async def test_forged_hand_off_is_not_taken(deployment: Deployment, state: str, ticket: bytes) -> None:
    """A hand-off without the decode worker's ticket is refused, whatever its state is, and the worker goes on."""
    async with scene(deployment, workers=WORKERS) as at:
        address = await asyncio.to_thread(_decode_address, at)

        def attack() -> list[DecodeFrame]:
            """Hand five off, one after the other."""
            with Peer(address) as forger:
                replies = []
                for _ in range(5):
                    forger.say(*handoff(request(0, 60), STATES[state], ticket))
                    replies += [frame for frame, _ in forger.frames(DecodeFrame, 0.2)]
                return replies

        replies = await asyncio.to_thread(attack)
        assert all(reply.reply.refusal for reply in replies), replies
        await _is_alive(at)


async def test_ten_forgers_at_a_high_rate_harm_no_request(deployment: Deployment) -> None:
    """Ten attackers that hand off requests at a high rate, for keys of others too, keep no client from its tokens."""
    async with scene(deployment, workers=WORKERS, steps_per_second=100) as at:
        address = await asyncio.to_thread(_decode_address, at)

        def attack() -> None:
            """Hand off what is open, and what is not."""
            with ExitStack() as stack:
                forgers = [stack.enter_context(Peer(address)) for _ in range(10)]

                def one_each() -> None:
                    """Hand one off from each."""
                    for forger in forgers:
                        keys = [asked.tokens.request_id for asked in list(at.victim.asked.values())]
                        forger.say(*handoff(request(RANDOM.choice([0, *keys]), 60), b"\xff" * 8))

                repeat(one_each, 2.0, 0.005)

        await asyncio.to_thread(attack)
        await _is_alive(at)


async def test_hand_off_message_that_never_ends_is_not_held(deployment: Deployment) -> None:
    """A decode worker keeps nothing of a message without end at its hand-off address, and goes on."""
    async with scene(deployment, workers=WORKERS) as at:
        address = await asyncio.to_thread(_decode_address, at)

        def attack() -> None:
            """Send parts."""
            with Tcp(address) as forger:
                assert forger.shake_hands()
                for _ in range(768):
                    if not forger.part(b"\0" * (1 << 20), more=True):
                        return

        before = peak_mib(at.workers[1].pid)
        await asyncio.to_thread(attack)
        await _is_alive(at)
        assert peak_mib(at.workers[1].pid) - before < 192


@pytest.mark.parametrize("state", variants("a vast position", long=list(STATES)[1:]))
async def test_state_from_a_prefill_worker_that_lies_ends_its_request_alone(deployment: Deployment, state: str) -> None:
    """A prefill worker that was sent the ticket, and hands off an invalid state, ends no decode worker."""
    async with scene(deployment, workers=("decode-0=lies", "worker-0=honest"), model="honest") as at:

        def attack() -> None:
            """Be a prefill worker: take what clients ask for, and hand it off with a state that is none."""
            role = WorkerRole.WORKER_ROLE_PREFILL
            with WorkerPeer(at.workers_address, "prefill-9", 7, role=role, max_requests=1024, model="lies") as liar:
                liar.hello()
                with ClientPeer(at.clients) as client, ExitStack() as stack:
                    client.hello()
                    forger: Peer | None = None
                    for _ in range(5):
                        client.ask(tokens=60, model="lies")
                        given = liar.heard("generate", seconds=5)
                        if given is None:
                            break
                        generate = Generate.FromString(given.generate.SerializeToString())
                        forger = forger or stack.enter_context(Peer(generate.handoff_address))
                        forger.say(*handoff(generate, STATES[state], generate.handoff_ticket, "prefill-9"))
                        list(forger.frames(DecodeFrame, 0.2))
                    assert forger is not None, "no hand-off was asked of it"

        await asyncio.to_thread(attack)
        await at.victim.unharmed()
        assert at.workers[0].is_running, at.workers[0].output
