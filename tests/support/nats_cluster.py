"""A cluster of three NATS servers with JetStream, on loopback."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.nats import NatsServer
from tests.support.ports import free_ports
from tests.support.small_disk import SmallDisk
from tests.support.waiting import until
from tokenbus.recordings.durable_log.stream import LogError, LogStream
from tokenbus.settings import Settings

_CONFIG = """\
server_name: {name}
http: '127.0.0.1:-1'
max_payload: 4MB
jetstream {{ store_dir: '{folder}'{limit} }}
cluster {{ name: tests, listen: '127.0.0.1:{port}', routes: [{routes}] }}
"""


@contextmanager
def cluster(folder: Path, size: int = 3, limit: str = "", disk_bytes: int = 0) -> Iterator[list[NatsServer]]:
    """Start the servers, each with a limit of JetStream or on a small disk if need be, and kill them at the end."""
    ports = free_ports(size)  # each server must know those of the others before they start
    routes = ", ".join(f"'nats://127.0.0.1:{port}'" for port in ports)
    with ExitStack() as stack:
        servers = []
        for number, port in enumerate(ports):
            own = folder / f"n{number}"
            own.mkdir()
            config = _CONFIG.format(name=own.name, folder=own / "js", port=port, routes=routes, limit=limit)
            disk = None
            if disk_bytes:
                (own / "js").mkdir()
                disk = stack.enter_context(SmallDisk(own / "js", disk_bytes))
            servers.append(NatsServer(own, config, disk))
            stack.callback(servers[-1].kill)
        yield servers


async def until_ready(settings: Settings) -> None:
    stream = LogStream(settings)
    connection = await stream.connect()

    async def is_ready() -> bool:
        try:
            await stream.info(connection, make=True)
        except LogError:
            return False
        return True

    await until(is_ready, every=0.1)
    await connection.close()
