"""What the tests over several processes share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.deployment import Deployment


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        made = Deployment(Path(folder))
        try:
            yield made
        finally:
            made.close()
