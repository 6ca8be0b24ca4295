"""Forged hand-offs: none is taken without a decode worker's ticket, and no state ends a worker (finding 8)."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from struct import pack
from typing import Any

import pytest
import zmq

from tests.integration.asking import all_exact, ask, wanted
from tests.integration.attacks.peers import (
    RANDOM,
    ClientPeer,
    Peer,
    Tcp,
    WorkerPeer,
    drawn,
    handoff,
    part,
    pour,
    request,
)
from tests.integration.attacks.scene import Scene, peak_mib, repeat, scene, variants
from tests.integration.deployment import Deployment, Overrides
from tests.integration.inprocess import processing
from tests.integration.programs import Program
from tests.integration.test_keys import HANDOFFS, keys_of, listening
from tests.services.bus.keyed import Keyring
from tests.support.waiting import until, wait_until
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.client_pb2 import ClientFrame
from tokenbus_contracts.generated.handoff_pb2 import DecodeFrame
from tokenbus_contracts.generated.request_pb2 import Abort, Generate
from tokenbus_contracts.generated.stream_pb2 import WorkerRole
from tokenbus_services.client import Client

WORKERS = ("prefill-0", "decode-0")
TOKENS = 60
ENDLESS = 100_000
_MOST_MIB = 512
"""What a decode worker may take above what it had, on a busy machine; unbounded it is more than 1,000."""
USED = "its ticket was used before, or is void: its request ended or went elsewhere"
STATES: dict[str, Callable[[int], bytes]] = {
    "one that goes on": lambda key: state_of(key, 1),
    "a vast position": lambda key: state_of(key, (1 << 32) - 1),
    "at its end": lambda key: state_of(key, TOKENS),
    "another request's": lambda key: state_of(key + 1, 1),
    "too short": lambda _: b"\0" * 7,
    "too long": lambda key: state_of(key, 1) + b"\0" * 4096,
}
"""States for a request's id; the first is as good as a prefill worker's."""


def state_of(key: int, position: int) -> bytes:
    """Return a state of the synthetic engine."""
    return pack("<8sQI", b"tbsynth1", key, position)


def forged(generate: Generate, state: str, ticket: bytes = b"", worker_id: str = "prefill-0") -> list[bytes]:
    """Return a hand-off of a request with one of the states."""
    return handoff(generate, STATES[state](generate.request_key), ticket, worker_id)


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
        ("one that goes on", b""),
        ("one that goes on", b"x" * 64),
        long=[(state, ticket) for state in STATES for ticket in (b"", b"x" * 64)],
    ),
)
async def test_forged_hand_off_is_not_taken(deployment: Deployment, state: str, ticket: bytes) -> None:
    """A hand-off without a ticket of its own is neither taken nor answered, whatever its state is."""
    async with scene(deployment, workers=WORKERS) as at:
        address = await asyncio.to_thread(_decode_address, at)

        def attack() -> list[DecodeFrame]:
            """Hand five off, one after the other."""
            with Peer(address) as forger:
                for _ in range(5):
                    forger.say(*forged(request(0, TOKENS), state, ticket))
                at.workers[1].wait_for("handoff.ticket: ")
                return [frame for frame, _ in forger.frames(DecodeFrame, 0.2)]

        replies = await asyncio.to_thread(attack)
        assert replies == []
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
                    for forger in forgers:
                        keys = [asked.tokens.request_id for asked in list(at.victim.asked.values())]
                        forger.say(*handoff(request(RANDOM.choice([0, *keys]), TOKENS), b"\xff" * 8))

                repeat(one_each, 2.0, 0.005)

        await asyncio.to_thread(attack)
        await _is_alive(at)


async def test_large_hand_offs_of_unadmitted_peers_harm_no_request(deployment: Deployment) -> None:
    """Hand-offs of long prompts, as fast as eight attackers can send them, neither hold up others' nor fill memory."""
    async with scene(deployment, workers=WORKERS) as at:
        address = await asyncio.to_thread(_decode_address, at)
        before = peak_mib(at.workers[1].pid)
        generate = request(0, TOKENS)
        generate.tokens.token_ids.extend([1] * 300_000)
        frame, state = forged(generate, "one that goes on", b"x" * 64)
        await asyncio.to_thread(pour, address, part(frame, more=True) + part(state), 3.0)
        await _is_alive(at)
        assert peak_mib(at.workers[1].pid) - before < _MOST_MIB


async def test_hand_off_message_that_never_ends_is_not_held(deployment: Deployment) -> None:
    """A decode worker keeps nothing of a message without end at its hand-off address, and goes on."""
    async with scene(deployment, workers=WORKERS) as at:
        address = await asyncio.to_thread(_decode_address, at)

        def attack() -> None:
            with Tcp(address) as forger:
                assert forger.shake_hands()
                for _ in range(768):
                    if not forger.part(b"\0" * (1 << 20), more=True):
                        return

        before = peak_mib(at.workers[1].pid)
        await asyncio.to_thread(attack)
        await _is_alive(at)
        assert peak_mib(at.workers[1].pid) - before < 192


@pytest.mark.parametrize("state", variants("a vast position", long=list(STATES)[2:]))
async def test_state_from_a_prefill_worker_that_lies_ends_its_request_alone(deployment: Deployment, state: str) -> None:
    """A prefill worker that was sent the ticket, and hands off an invalid state, ends no decode worker."""
    async with scene(deployment, workers=("decode-0=lies", "worker-0=honest"), model="honest") as at:

        def attack() -> list[str]:
            """Be a prefill worker: take what clients ask for, and hand it off with a state that is none."""
            refusals: list[str] = []
            role = WorkerRole.WORKER_ROLE_PREFILL
            with WorkerPeer(at.workers_address, "prefill-9", 7, role=role, max_requests=1024, model="lies") as liar:
                liar.hello()
                with ClientPeer(at.clients) as client, ExitStack() as stack:
                    client.hello()
                    forger: Peer | None = None
                    for _ in range(5):
                        client.ask(tokens=TOKENS, model="lies")
                        given = liar.heard("generate")
                        assert given is not None
                        generate = Generate.FromString(given.generate.SerializeToString())
                        forger = forger or stack.enter_context(Peer(generate.handoff_address))
                        forger.say(*forged(generate, state, generate.handoff_ticket, "prefill-9"))
                        refusals += [frame.reply.refusal for frame, _ in islice(forger.frames(DecodeFrame), 1)]
            return refusals

        refusals = await asyncio.to_thread(attack)
        assert [refusal.partition(".")[0].partition(":")[0] for refusal in refusals] == ["state"] * 5
        await at.victim.unharmed()
        assert at.workers[0].is_running, at.workers[0].output


async def test_ticket_is_for_one_request_and_one_prefill_worker(deployment: Deployment, tmp_path: Path) -> None:
    """A prefill worker hands off what was assigned to it, once, and nothing else; a thief of its ticket none."""
    keyring = Keyring(tmp_path)
    names = ("prefill-0", "decode-0", "prefill-9", "thief", "client")
    for name in names:
        keyring.make(name)
    keyring.allow(*(keyring.entry(name) for name in names))
    patient: Overrides = {"bus__heartbeat_timeout_ms": 60_000}  # the attackers send no heartbeats
    async with processing(deployment, **listening(keyring), **patient) as (processor, found):
        addresses: dict[str, Any] = dict(found)

        async def started(name: str) -> Program:
            chosen = {**addresses, **keys_of(keyring, name), **HANDOFFS, "worker__role": name.partition("-")[0]}
            return await asyncio.to_thread(deployment.start_worker, name, **chosen)

        def peer(name: str, generate: Generate) -> Peer:
            """Connect to the decode worker with a key."""

            def prove(socket: "zmq.Socket[bytes]") -> None:
                keyring.prove(socket, name)
                socket.setsockopt(zmq.CURVE_SERVERKEY, generate.handoff_server_key)

            return Peer(generate.handoff_address, prove)

        decode = await started("decode-0")
        settings = deployment.settings(**addresses, **keys_of(keyring, "client"), client__drain_timeout_ms=0)
        async with Client(settings) as client:
            with ExitStack() as stack:
                liar = WorkerPeer(
                    addresses["bus__workers_address"],
                    "prefill-9",
                    7,
                    prove=partial(keyring.prove, name="prefill-9"),
                    role=WorkerRole.WORKER_ROLE_PREFILL,
                    max_requests=2,
                )
                stack.enter_context(liar)
                await asyncio.to_thread(liar.hello)
                asked = [client.generate(wanted(TOKENS)) for _ in range(2)]
                frames = [await asyncio.to_thread(liar.heard, "generate") for _ in asked]
                mine, other = (Generate.FromString(frame.generate.SerializeToString()) for frame in frames if frame)
                ticket, later, good = mine.handoff_ticket, _changed(mine, deadline_unix_ms=1 << 60), "one that goes on"
                thief = stack.enter_context(peer("thief", mine))
                thief.say(*forged(mine, good, ticket, "prefill-9"))
                await asyncio.to_thread(decode.wait_for, "handoff.ticket: ")
                forger = stack.enter_context(peer("prefill-9", mine))
                for _ in range(3):
                    forger.say(*forged(request(0, TOKENS), good, ticket, "prefill-9"))
                    forger.say(*forged(_changed(mine, request_key=drawn()), good, ticket, "prefill-9"))
                forger.say(*forged(other, good, ticket, "prefill-9"))
                forger.say(*forged(mine, good, ticket, "prefill-0"))
                forger.say(*forged(mine, good, ticket[:-1], "prefill-9"))
                forger.say(*forged(later, good, ticket, "prefill-9"))
                for refusal in ("", USED):  # the one that is its own, and that again
                    forger.say(*forged(mine, good, ticket, "prefill-9"))
                    assert await asyncio.to_thread(_reply, forger) == (mine.request_key, refusal)
                liar.leave()
                await until(lambda: "prefill-9" not in processor.workers.by_id)
                forger.say(*forged(request(0, TOKENS), good, ticket, "prefill-9"))
                forger.say(*forged(mine, good, ticket, "prefill-9"))
                assert await asyncio.to_thread(_reply, forger) == (mine.request_key, USED)
            await started("prefill-0")
            await all_exact(ask(client, 8, 61), 61)


def test_ticket_of_a_request_that_has_ended_is_void(deployment: Deployment) -> None:
    """A prefill worker hands off no request that has ended or was aborted before; others it does.

    The decode worker is full by then: it would refuse a good ticket for that alone, and leave it unused.
    """
    deployment.overrides |= {"bus.heartbeat_timeout_ms": 60_000}
    deployment.start_processor()
    deployment.start_worker("decode-0", "--steps-per-second", "1", worker__role="decode", worker__max_requests=3)
    workers, clients = (str(deployment.overrides[f"bus.{name}_address"]) for name in ("workers", "clients"))
    role = WorkerRole.WORKER_ROLE_PREFILL
    with WorkerPeer(workers, "prefill-9", 7, role=role, max_requests=8) as liar, ClientPeer(clients) as client:
        liar.hello()
        client.hello()
        goes_on, ended, aborted = (_assigned(client, liar) for _ in range(3))
        with Peer(goes_on.handoff_address) as forger:
            assert _handed_off(forger, goes_on) == ""
            liar.publish(1, 1, [(ended.request_key, 0)], status=RowStatus.FINISHED_STOP)
            client.tell(ClientFrame(abort=Abort(request_key=aborted.request_key)))
            for _ in range(2):  # the decode worker has room for two more only now
                assert _handed_off(forger, _assigned(client, liar)) == ""
            for void in (ended, aborted):
                wait_until(partial(_is_void, forger, void, "it has 3 requests, as many as it takes"))


def _assigned(client: ClientPeer, liar: WorkerPeer) -> Generate:
    """Ask for a request, and return it as the prefill worker gets it, with its ticket."""
    client.ask(tokens=ENDLESS)
    frame = liar.heard("generate")
    assert frame is not None
    return Generate.FromString(frame.generate.SerializeToString())


def _handed_off(forger: Peer, generate: Generate) -> str:
    """Hand a request off with its own ticket, and return why it was refused."""
    forger.say(*forged(generate, "one that goes on", generate.handoff_ticket, "prefill-9"))
    key, refusal = _reply(forger)
    assert key == generate.request_key
    return refusal


def _is_void(forger: Peer, generate: Generate, full: str) -> bool:
    """Hand a request off to a decode worker that is full, and tell whether its ticket is void."""
    refusal = _handed_off(forger, generate)
    assert refusal in {USED, full}
    return refusal == USED


def _changed(generate: Generate, **fields: int) -> Generate:
    """Return a request with other values."""
    changed = Generate()
    changed.CopyFrom(generate)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _reply(forger: Peer) -> tuple[int, str]:
    """Return the next answer to a hand-off: whose it is, and why it was refused."""
    frame, _ = next(forger.frames(DecodeFrame))
    return frame.reply.request_key, frame.reply.refusal
