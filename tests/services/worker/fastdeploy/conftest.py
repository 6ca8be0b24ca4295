"""What the tests of the drop-in share: a bus of their own between the save side and the get side of this process."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.worker.fastdeploy.bus import settings_in
from tokenbus_services.worker import fastdeploy


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, as the addresses of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture
def bus(folder: Path) -> Iterator[Path]:
    """Both sides of the drop-in in this process, with addresses in a folder; nothing of them is left afterwards."""
    fastdeploy.configure(fastdeploy.Options(settings=settings_in(folder)))
    try:
        yield folder
    finally:
        fastdeploy.close()
        fastdeploy.configure(fastdeploy.Options())
