"""A deadline is a moment: no restart, resume or other client moves it (finding 9), and settings that cannot work."""

import asyncio
import time

import pytest

from tests.integration.asking import Asked, begun, wanted
from tests.integration.attacks.peers import ClientPeer
from tests.integration.attacks.scene import Scene, scene, variants
from tests.integration.deployment import Deployment
from tokenbus_contracts.generated.client_pb2 import ServerFrame
from tokenbus_contracts.generated.request_pb2 import ErrorCode
from tokenbus_services.settings import Settings, SettingsError

DEADLINE_MS = 4000
TOKENS = 3600
"""At 100 steps of 3 tokens a second these take three times as long as the deadline allows."""
_DEADLINE = ErrorCode.ERROR_CODE_DEADLINE


async def _asked(at: Scene, count: int = 4) -> list[Asked]:
    """Ask for requests that cannot be done by their deadline."""
    asked = []
    for _ in range(count):
        generate = wanted(TOKENS)
        generate.deadline_ms = DEADLINE_MS
        asked.append(Asked(at.client.generate(generate)))
    await begun(asked)
    return asked


async def _ended_at_the_deadline(asked: list[Asked]) -> None:
    for each in asked:
        audit = await each.ended()
        assert audit.is_exact, audit
        assert audit.error is not None, "it got all of its tokens, long after its deadline"
        assert audit.error.code == _DEADLINE, audit.error


@pytest.mark.parametrize("restarts", variants(1, long=(3,)))
async def test_deadline_survives_a_restart_of_the_processor(deployment: Deployment, restarts: int) -> None:
    """A request whose processor is killed, once or more often, ends when it would have ended without that."""
    async with scene(deployment, steps_per_second=100) as at:
        at.victim.leave()
        asked = await _asked(at)
        for _ in range(restarts):
            await asyncio.to_thread(at.restart)
        await _ended_at_the_deadline(asked)


async def test_deadline_that_passes_while_no_processor_is_there_ends_the_request(deployment: Deployment) -> None:
    """A request whose deadline passes while its processor is away ends with that, whatever came in between."""
    async with scene(deployment, steps_per_second=100) as at:
        at.victim.leave()
        asked = await _asked(at)
        ends = time.time() + DEADLINE_MS / 1000
        at.processor.kill()
        await asyncio.sleep(max(0.0, ends + 0.5 - time.time()))
        at.processor = await asyncio.to_thread(deployment.start_processor)
        await _ended_at_the_deadline(asked)


@pytest.mark.parametrize("moment", variants((1 << 64) - 1, long=(0, 1 << 62)))
async def test_resume_moves_no_deadline_back(deployment: Deployment, moment: int) -> None:
    """The next life of a client that resumes with a later deadline, or with none, has no more time than the first."""
    fields = {"deadline_unix_ms": moment} if moment else {}
    async with scene(deployment, steps_per_second=100, bus__heartbeat_timeout_ms=2000) as at:

        def attack() -> ServerFrame | None:
            """Ask, die, and resume as the next life until it has ended."""
            with ClientPeer(at.clients, name="owner") as owner:
                owner.hello()
                key = owner.ask(tokens=TOKENS, deadline_ms=DEADLINE_MS)
                owner.heard("outputs")
                at.processor.wait_for('"client silent"')
            with ClientPeer(at.clients, name="owner") as next_life:
                next_life.hello()
                next_life.resume(key, **fields)
                ends = time.monotonic() + 10
                for frame, _ in next_life.frames(ServerFrame, 3):
                    next_life.beat()
                    if frame.HasField("error"):
                        return frame
                    if time.monotonic() > ends:
                        break
            return None

        told = await asyncio.to_thread(attack)
        await at.victim.unharmed()
    assert told is not None, "it went on long after its deadline"
    assert told.error.code == _DEADLINE, told


async def test_request_after_its_deadlines_moment_is_not_begun(deployment: Deployment) -> None:
    """A request whose moment is over when it comes ends at once with deadline, without a token."""
    async with scene(deployment) as at:
        generate = wanted(60)
        generate.deadline_unix_ms = 1
        audit = await Asked(at.client.generate(generate)).ended()
        assert audit.error is not None
        assert audit.error.code == _DEADLINE
        await at.victim.unharmed()


def test_settings_that_lose_every_peer_that_reconnects_are_refused() -> None:
    """A heartbeat's timeout below the time that a reconnection may take is refused with both values."""
    with pytest.raises(SettingsError, match=r"bus\.heartbeat_timeout_ms: at least .* a reconnect, 500, got 499$"):
        Settings.load(environment={}, overrides={"bus.heartbeat_interval_ms": 100, "bus.heartbeat_timeout_ms": 499})
