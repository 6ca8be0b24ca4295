"""What the tests of the drop-in share: a queue of their own between the save side and the get side of this process."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.fastdeploy import kernel
from tests.engines.fastdeploy.bus import Beside, speaking
from tests.engines.fastdeploy.saving_program import ROOT
from tokenbus.engines import fastdeploy


@pytest.fixture
def bus(folder: Path) -> Iterator[Path]:
    with speaking("develop", folder):
        yield folder


@pytest.fixture
def beside(bus: Path) -> Iterator[Beside]:
    assert bus.exists()
    with kernel.queue() as queue:
        yield Beside(queue)


@pytest.fixture
def environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The engine's environment, with queue 5 and a folder for temporary files of its own; both sides end with it."""
    for name in [name for name in os.environ if name.startswith(("TOKENBUS_", "INFERENCE_MSG"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("INFERENCE_MSG_QUEUE_ID", "5")
    monkeypatch.setenv("INFERENCE_MSG_ID", "1")
    monkeypatch.chdir(folder)
    yield os.environ | {"TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    fastdeploy.close()
