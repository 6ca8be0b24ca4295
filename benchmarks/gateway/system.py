"""A processor, a worker, a gateway and its clients, each a process."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.gateway.clients import CONNECTIONS
from benchmarks.programs import PATIENCE, tokenbus

_LOOK_SECONDS = 0.05


class Load:
    """The clients, in a process of their own."""

    def __init__(self, address: str) -> None:
        """Connect them."""
        command = [sys.executable, "-m", "benchmarks.gateway.clients", *address.rsplit(":", 1)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def pid(self) -> int:
        """Their process."""
        return self._process.pid

    def ask(self, request: dict[str, Any] | None) -> dict[str, float]:
        """Ask for something from now on, and return what came so far."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise SystemExit("the clients have no pipes")
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise SystemExit("the clients ended")
        told: dict[str, float] = json.loads(line)
        return told

    def close(self) -> None:
        """End them."""
        self._process.kill()
        self._process.communicate()  # which closes its pipes, too


@contextmanager
def running(pace: int, gateways: int = 1) -> Iterator[tuple[str, Load]]:
    """Run a processor, a worker and a gateway of so many processes, and the clients."""
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as folder:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TOKENBUS_")} | {
            "TOKENBUS_BUS_WORKERS_ADDRESS": f"ipc://{folder}/w",
            "TOKENBUS_BUS_CLIENTS_ADDRESS": f"ipc://{folder}/c",
            "TOKENBUS_DEAD_LETTERS_DIRECTORY": f"{folder}/dead",
            "TOKENBUS_METRICS_ADDRESS": "",
            "TOKENBUS_GATEWAY_ADDRESS": "127.0.0.1:0",
            "TOKENBUS_LOG_FORMAT": "json",
        }
        log = Path(folder) / "gateway.log"
        commands = [
            ["processor"],
            ["worker", "--max-running", str(CONNECTIONS), "--steps-per-second", str(pace)],
            ["gateway", "--processes", str(gateways)],
        ]
        processes = []
        with log.open("w") as file:
            for command in commands:
                output = file if command[0] == "gateway" else subprocess.DEVNULL
                processes.append(
                    subprocess.Popen([*tokenbus(), *command], env=environment, stdout=output, stderr=output)
                )
        load = None
        try:
            address = listening_at(log, processes[-1])
            load = Load(address)
            yield address, load
        finally:
            if load is not None:
                load.close()
            for process in processes:
                process.kill()
                process.wait()


def listening_at(log: Path, gateway: "subprocess.Popen[Any]") -> str:
    """Return HOST:PORT of a gateway, once its log says it."""
    for _ in waiting_for(gateway):
        if found := re.search(r'"listening".*"http://([^"]+)"', log.read_text()):
            return found[1]
    raise SystemExit(f"the gateway did not listen; it wrote:\n{log.read_text()}")


def until_ready(address: str, gateway: "subprocess.Popen[Any]") -> None:
    """Wait until a gateway's requests find a worker."""
    for _ in waiting_for(gateway):
        with suppress(OSError), urllib.request.urlopen(f"http://{address}/readyz", timeout=PATIENCE):
            return
    raise SystemExit(f"the gateway finds no worker within {PATIENCE:g} s, or has ended")


def waiting_for(process: "subprocess.Popen[Any]") -> Iterator[None]:
    """Yield from time to time, as long as a process runs and is not given up."""
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        yield
        time.sleep(_LOOK_SECONDS)
