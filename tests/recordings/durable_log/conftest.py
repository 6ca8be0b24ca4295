"""A NATS server with JetStream, of a test's own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nats import NatsServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    made = NatsServer(tmp_path, f"jetstream {{ store_dir: '{tmp_path}/js' }}\nhttp: '127.0.0.1:-1'\n")
    yield made
    made.kill()
