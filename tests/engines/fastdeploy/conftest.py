"""What the tests of the drop-in share: a queue of their own between the save side and the get side of this process."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.fastdeploy import kernel
from tests.engines.fastdeploy.bus import Beside, speaking


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, as the addresses of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture
def bus(folder: Path) -> Iterator[Path]:
    with speaking("develop", folder):
        yield folder


@pytest.fixture
def beside(bus: Path) -> Iterator[Beside]:
    """The drop-in and the kernel's own queue, beside each other."""
    assert bus.exists()
    with kernel.queue() as queue:
        yield Beside(queue)
