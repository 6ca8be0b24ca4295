"""Attackers that claim to be a worker or a client that is alive, or take its name for ever (findings 2 and 6)."""

import asyncio
from typing import Any

import pytest

from tests.integration.asking import wanted
from tests.integration.attacks.peers import ClientPeer, WorkerPeer, drawn
from tests.integration.attacks.scene import Scene, repeat, scene, variants
from tests.integration.deployment import Deployment
from tokenbus_contracts.generated.client_pb2 import ServerFrame
from tokenbus_contracts.generated.stream_pb2 import ProcessorFrame, RefusalReason
from tokenbus_services.client import Client

SLOW = 20
"""Steps a second of the worker that is impersonated: much time between two of its steps."""
_TAKEN = RefusalReason.REFUSAL_REASON_WORKER_ID_TAKEN


def _epoch(at: Scene) -> int:
    """Return the live worker's epoch, as any client that watches learns it."""
    with ClientPeer(at.clients) as spy:
        spy.hello()
        spy.watched("worker-0")
        return spy.watched_epoch


def _is_refused(answer: ProcessorFrame | None) -> bool:
    return answer is not None and answer.refusal.reason == _TAKEN


def _forge(at: Scene, epoch: int) -> None:
    """Say hello as the live worker, and publish forged rows of every open request in one burst, at every place."""
    rows = [(asked.tokens.request_id, 0) for asked in list(at.victim.asked.values())]
    fields: dict[str, Any] = {"first_sequence": 1, "next_sequence": 1 << 40}
    with WorkerPeer(at.workers_address, "worker-0", epoch, **fields) as forger:
        answer = forger.hello()
        begin = answer.welcome.resume_from if answer is not None and answer.HasField("welcome") else 1
        for number in range(64):
            forger.publish(begin + number, 1_000_000 + number, [(key, 8 * number) for key, _ in rows], 8)
        forger.heard("refusal", seconds=0.2)


@pytest.mark.parametrize("later", variants(0, long=(1, 1 << 40)))
async def test_rows_of_a_forged_worker_reach_no_client(deployment: Deployment, later: int) -> None:
    """A hello with a live worker's name and a burst of rows delivers none of them, whatever epoch it claims."""
    async with scene(deployment, steps_per_second=SLOW) as at:
        epoch = await asyncio.to_thread(_epoch, at)
        await asyncio.to_thread(repeat, lambda: _forge(at, epoch + later), 1.0)
        await at.victim.unharmed()


async def test_hello_of_a_live_worker_is_refused(deployment: Deployment) -> None:
    """Equal and larger epochs of a live worker are refused without its proof: with none, and with another one."""
    async with scene(deployment) as at:
        epoch = await asyncio.to_thread(_epoch, at)
        for later, proof in ((0, b""), (0, b"x" * 16), (1, b""), (1, b"x" * 16), ((1 << 63) - epoch, b"")):
            with WorkerPeer(at.workers_address, "worker-0", epoch + later, proof=proof) as forger:
                assert _is_refused(await asyncio.to_thread(forger.hello)), (later, proof)
        await at.victim.unharmed()


@pytest.mark.parametrize("order", variants("gap", "goodbye", long=("heartbeat", "nothing")))
async def test_forged_hello_ends_no_request(deployment: Deployment, order: str) -> None:
    """A hello with a live worker's name and epoch, and a gap, a goodbye or a claim behind it, end no request."""
    fields: dict[str, Any] = {"next_sequence": 1 << 40} | ({"first_sequence": 1 << 40} if order == "nothing" else {})
    async with scene(deployment, steps_per_second=SLOW) as at:
        epoch = await asyncio.to_thread(_epoch, at)

        def attack() -> None:
            with WorkerPeer(at.workers_address, "worker-0", epoch, **fields) as forger:
                forger.greet()
                if order == "gap":
                    forger.gap(1, 1 << 40)
                elif order == "goodbye":
                    forger.leave()
                elif order == "heartbeat":
                    forger.beat(1 << 40)
                forger.heard("refusal", seconds=0.1)

        await asyncio.to_thread(repeat, attack, 1.0)
        await at.victim.unharmed()


@pytest.mark.parametrize(
    ("epoch", "leaves"),
    variants(
        (1 << 63, "a goodbye"), ((1 << 64) - 1, "no word"), long=((1 << 63, "no word"), ((1 << 64) - 1, "a goodbye"))
    ),
)
async def test_no_epoch_locks_a_name_out(deployment: Deployment, epoch: int, leaves: str) -> None:
    """While a worker is away an attacker takes its name with a vast epoch; once that is gone, the worker is served."""
    async with scene(deployment, workers=("worker-0", "worker-1"), bus__heartbeat_timeout_ms=2000) as at:
        at.victim.leave()
        for worker in at.workers:
            worker.kill()

        def attack() -> None:
            """Take the name when its life is over, and leave."""
            with WorkerPeer(at.workers_address, "worker-0", epoch) as thief:
                answer = thief.hello()
                assert answer is not None
                assert answer.HasField("welcome"), answer
                if leaves == "a goodbye":
                    thief.leave()
                    thief.listen(0.1)

        await asyncio.to_thread(attack)
        again = await asyncio.to_thread(deployment.start_worker)
        assert again.lines('"connected"')
        tokens = at.client.generate(wanted(60))
        assert len([token async for token in tokens]) == 60


def _session(client: Client) -> int:
    return client.sessions[0]._hello().session


@pytest.mark.parametrize(
    ("name", "proof"),
    variants(("attacker", b""), ("victim", b"x" * 16), long=(("attacker", b"x" * 16), ("victim", b""))),
)
async def test_session_that_is_alive_is_not_taken(deployment: Deployment, proof: bytes, name: str) -> None:
    """A hello with a live client's session number is refused, and the client goes on; the number is no credential."""
    async with scene(deployment) as at:
        session = _session(at.client)

        def attack() -> ServerFrame | None:
            """Say hello as the victim."""
            with ClientPeer(at.clients, name=name, session=session) as thief:
                thief._hello.proof = proof
                return thief.hello()

        answer = await asyncio.to_thread(attack)
        assert answer is not None
        assert answer.refusal.reason == RefusalReason.REFUSAL_REASON_SESSION_TAKEN
        await at.victim.unharmed()


async def test_session_whose_client_was_killed_is_not_taken(deployment: Deployment) -> None:
    """The frames that wait for a client that was killed are not given to an attacker that knows its session number."""
    async with scene(deployment) as at:
        session = drawn()
        heard: list[str] = []

        def attack() -> None:
            """Let a client die with tokens on their way, and claim its session."""
            with ClientPeer(at.clients, name="doomed", session=session) as doomed:
                doomed.hello()
                doomed.ask(tokens=600)
                doomed.heard("outputs")
            with ClientPeer(at.clients, name="attacker", session=session) as thief:
                thief.hello()
                heard.extend(str(frame.WhichOneof("body")) for frame, _ in thief.frames(ServerFrame, 0.5))

        await asyncio.to_thread(attack)
        assert "outputs" not in heard
        await at.victim.unharmed()
