"""One NATS server with JetStream, for all tests of a session."""

import asyncio
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.support.nats import NatsServer
from tokenbus.recordings.durable_log.stream import LogStream
from tokenbus.settings import DurableLogSettings, Settings

_NUMBERS = count()


@pytest.fixture(scope="session")
def session_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    folder = tmp_path_factory.mktemp("nats")
    made = NatsServer(folder, f"jetstream {{ store_dir: '{folder}/js' }}\nhttp: '127.0.0.1:-1'\n")
    yield made
    made.kill()


@pytest.fixture
def server(session_server: NatsServer) -> Iterator[NatsServer]:
    """A server without streams, and a new name for a log; a test may kill it, or start it again otherwise."""
    session_server.log = (
        f"log-{next(_NUMBERS)}"  # a stream that is made under the name of another may find its messages
    )
    process, config = session_server.process, session_server._config
    yield session_server
    if (session_server.process, session_server._config, process.poll()) == (process, config, None):
        session_server.resume()
        asyncio.run(_delete_streams(session_server))
        return
    session_server.kill()
    session_server._config = config
    shutil.rmtree(Path(session_server.folder, "js"), ignore_errors=True)
    session_server.start()


async def _delete_streams(server: NatsServer) -> None:
    stream = LogStream(Settings(durable_log=DurableLogSettings(address=f"nats://{server.server}")))
    connection = await stream.connect()
    for found in await connection.jetstream.streams_info():
        await connection.jetstream.delete_stream(found.config.name or "")
    await connection.close()
