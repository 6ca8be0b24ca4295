"""What the tests of ZeroMQ share: transports of each kind, closed after the test."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.bus.harness import SETTINGS, Bus
from tokenbus.settings import BusSettings

Make = Callable[..., Bus]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[Bus] = []

    def bus(kind: str, settings: BusSettings = SETTINGS) -> Bus:
        made.append(Bus(kind, tmp_path, settings))
        return made[-1]

    yield bus
    for each in made:
        await each.close()


@pytest.fixture
def ipc(make: Make) -> Bus:
    return make("zeromq-ipc")


@pytest.fixture
def tcp(make: Make) -> Bus:
    return make("zeromq-tcp")
