"""docs/extending.md: the transport there holds what every transport must."""

import asyncio
import random
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.pages import blocks, module_of
from tests.services.bus import test_conformance as suite
from tests.services.bus.harness import MAX_PART_BYTES, Bus
from tests.support.waiting import soon, until
from tokenbus_services.bus import Transport, ZeroMQTransport
from tokenbus_services.settings import BusSettings

(BLOCK,) = [block for block in blocks("python", of="docs/extending.md") if "class DeflatedTransport" in block.text]
EXAMPLE: Any = module_of(BLOCK, "deflated")

globals().update({name: test for name, test in vars(suite).items() if name.startswith("test_")})


class DeflatedBus(Bus):
    """The example's transport, over Unix sockets."""

    def make(self, settings: BusSettings) -> Transport:
        """Return the example's."""
        transport: Transport = EXAMPLE.DeflatedTransport(settings)
        return transport


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    """Return the example's transport, in the place of those that the suite knows."""
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    made = DeflatedBus("zeromq-ipc", tmp_path)
    yield made
    await made.close()
    assert not errors


async def test_what_cannot_be_made_smaller(bus: Bus) -> None:
    """A part of the largest size arrives also where deflating makes it larger."""
    listener, connection, peer = await bus.pair()
    noise = [random.Random(1).randbytes(MAX_PART_BYTES)]  # noqa: S311 - no secret
    assert len(zlib.compress(noise[0], 1)) > MAX_PART_BYTES
    assert connection.send(noise)
    assert await soon(listener.receive()) == (peer, noise)


@pytest.mark.parametrize(
    "part",
    [
        b"plain",
        b"",
        zlib.compress(b"cut")[:-1],
        zlib.compress(b"x") + b"more",
        zlib.compress(bytes(100 * MAX_PART_BYTES)),
    ],
    ids=["plain", "empty", "cut", "more", "bomb"],
)
async def test_what_is_not_deflated_is_dropped(bus: Bus, part: bytes) -> None:
    """A part that is not deflated, or would grow beyond the bound, is reported and dropped, and the next arrives."""
    reasons: list[str] = []
    listener = await bus.listen(refused=reasons.append)
    receiving = bus.spawn(listener.receive())
    stranger = await ZeroMQTransport(bus.settings).connect(listener.address)
    assert stranger.send([part])
    await until(lambda: bool(reasons))
    connection = await bus.connect(listener.address)
    assert connection.send([b"next"])
    assert (await soon(receiving))[1] == [b"next"]
    assert reasons == [f"a part that is not deflated, or is above {MAX_PART_BYTES} bytes: dropped"]
    await stranger.close()
