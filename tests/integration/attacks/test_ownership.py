"""Attackers that resume, abort or ask for the requests of others (finding 10)."""

import asyncio
import time

import pytest

from tests.integration.asking import Asked, all_exact, begun, wanted
from tests.integration.attacks.peers import ClientPeer, drawn, request
from tests.integration.attacks.scene import Scene, repeat, scene, variants
from tests.integration.deployment import Deployment
from tokenbus_contracts.generated.client_pb2 import ClientFrame, ServerFrame
from tokenbus_contracts.generated.request_pb2 import Abort, ErrorCode
from tokenbus_services.client import Client

_UNKNOWN = ErrorCode.ERROR_CODE_UNKNOWN_REQUEST


def _keys(at: Scene) -> list[int]:
    return [asked.tokens.request_id for asked in list(at.victim.asked.values())]


@pytest.mark.parametrize(
    ("name", "position"),
    variants(("attacker", 0), ("victim", 30), long=(("attacker", 30), ("victim", 0), ("victim", (1 << 31) - 1))),
)
async def test_request_of_a_live_client_cannot_be_resumed(deployment: Deployment, name: str, position: int) -> None:
    """A resume of another's request is answered as one of no request, whatever its name; its owner misses nothing."""
    async with scene(deployment, steps_per_second=50) as at:

        def attack() -> list[ServerFrame]:
            """Resume every open request of the victim."""
            with ClientPeer(at.clients, name=name) as thief:
                thief.hello()
                for key in _keys(at):
                    thief.resume(key, position)
                return [frame for frame, _ in thief.frames(ServerFrame, 1.5) if not frame.HasField("heartbeat")]

        answers = await asyncio.to_thread(attack)
        assert answers
        assert {answer.error.code for answer in answers} == {_UNKNOWN}, answers
        await at.victim.unharmed()


async def test_request_of_a_live_client_cannot_be_aborted(deployment: Deployment) -> None:
    """An abort of another's request ends nothing, alone or behind a resume of it."""
    async with scene(deployment, steps_per_second=50) as at:

        def attack() -> None:
            """Resume and abort every open request of the victim, for a while."""
            with ClientPeer(at.clients, name="attacker") as thief:
                thief.hello()

                def end_all() -> None:
                    for key in _keys(at):
                        thief.tell(ClientFrame(abort=Abort(request_key=key)))
                        thief.resume(key, 3)
                        thief.tell(ClientFrame(abort=Abort(request_key=key)))

                repeat(end_all, 1.0, 0.05)

        await asyncio.to_thread(attack)
        await at.victim.unharmed()


async def test_request_of_a_live_client_cannot_be_asked_for_again(deployment: Deployment) -> None:
    """A request with the key of another's is refused as a duplicate, and its owner misses nothing."""
    async with scene(deployment, steps_per_second=50) as at:

        def attack() -> set[int]:
            """Ask with every key of the victim."""
            with ClientPeer(at.clients) as thief:
                thief.hello()
                for key in _keys(at):
                    thief.tell(ClientFrame(generate=request(key, 60)))
                return {frame.error.code for frame, _ in thief.frames(ServerFrame, 0.5) if frame.HasField("error")}

        assert await asyncio.to_thread(attack) == {ErrorCode.ERROR_CODE_DUPLICATE_REQUEST}
        await at.victim.unharmed()


async def test_tokens_that_wait_for_a_client_cannot_be_had_by_another(deployment: Deployment) -> None:
    """A request that ended while its client acknowledged nothing is as good as unknown to every other client."""
    async with scene(deployment) as at:

        def attack() -> list[ServerFrame]:
            """Let a live client leave all of its tokens unacknowledged, and ask for them from elsewhere."""
            with ClientPeer(at.clients, name="owner") as owner, ClientPeer(at.clients) as thief:
                owner.hello()
                thief.hello()
                key = owner.ask(tokens=3)
                owner.heard("outputs")
                time.sleep(0.2)
                thief.resume(key)
                return [frame for frame, _ in thief.frames(ServerFrame, 1.0) if not frame.HasField("heartbeat")]

        answers = await asyncio.to_thread(attack)
        assert [answer.error.code for answer in answers] == [_UNKNOWN], answers
        await at.victim.unharmed()


async def test_request_of_a_killed_client_is_resumed_by_its_next_life_alone(deployment: Deployment) -> None:
    """Once a client was killed its next life takes its request up; a client of another name is not given it before."""
    async with scene(deployment, bus__heartbeat_timeout_ms=2000) as at:

        def attack() -> int:
            """Let a client die, and try to have its request."""
            with ClientPeer(at.clients, name="owner") as owner:
                owner.hello()
                key = owner.ask(tokens=3000, top_logprobs=2)
                owner.heard("outputs")
            with ClientPeer(at.clients) as thief:
                thief.hello()
                thief.resume(key)
                answer = thief.heard("outputs", "error", seconds=2)
                assert answer is not None
                assert answer.error.code == _UNKNOWN, answer
            return key

        key = await asyncio.to_thread(attack)
        async with Client(deployment.settings(client__name="owner", client__drain_timeout_ms=0)) as next_life:
            for _ in range(20):  # until its earlier life is known to be gone
                asked = Asked(next_life.resume(key, 0))
                audit = await asked.ended()
                if audit.error is None or audit.error.code != _UNKNOWN:
                    break
                await asyncio.sleep(0.5)
            assert audit.error is None, audit.error
            assert audit.is_exact
            assert audit.position == 3000
        await at.victim.unharmed()


async def test_client_that_lost_its_request_to_its_next_life_is_told(deployment: Deployment) -> None:
    """A client that was silent for too long, and comes back, gets an error: its request was taken up elsewhere."""
    async with scene(
        deployment, bus__heartbeat_interval_ms=300, bus__heartbeat_timeout_ms=1500, worker__max_requests=8
    ) as at:

        def attack() -> ServerFrame | None:
            """Be silent, lose the request, and come back."""
            with ClientPeer(at.clients, name="owner") as owner, ClientPeer(at.clients, name="owner") as next_life:
                owner.hello()
                key = owner.ask(tokens=30_000)
                owner.heard("outputs")
                at.processor.wait_for('"client silent"')
                next_life.hello()
                next_life.resume(key)
                taken = next_life.heard("outputs", "error", seconds=10)
                assert taken is not None
                assert taken.HasField("outputs"), taken
                owner.come_back()
                for frame, _ in owner.frames(ServerFrame, 3):
                    if frame.error.request_key == key:
                        return frame
            return None

        told = await asyncio.to_thread(attack)
        assert told is not None
        assert told.error.code == ErrorCode.ERROR_CODE_TAKEN_UP
        await at.victim.unharmed()


async def test_resumes_beside_a_processors_restart_take_nothing_for_long(deployment: Deployment) -> None:
    """Resumes of a live client's requests just before a restart of the processor do not keep it from its tokens."""
    async with scene(deployment, processor__handoff_timeout_ms=2000, processor__unclaimed_timeout_ms=2000) as at:
        keys = [drawn() for _ in range(4)]
        asked = [Asked(at.client.generate(wanted(2400, key=key))) for key in keys]
        await begun(asked)

        def attack() -> None:
            """Resume all of it before the restart, when it is owned."""
            with ClientPeer(at.clients) as thief:
                thief.hello()
                repeat(lambda: thief.resume_all(keys), 0.5, 0.01)

        await asyncio.to_thread(attack)
        await asyncio.to_thread(at.restart)
        await all_exact(asked, 2400)
        await at.victim.unharmed()
