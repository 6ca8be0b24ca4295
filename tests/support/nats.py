"""A real NATS server for tests, on loopback, at a port that it chooses and keeps."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.small_disk import SmallDisk
from tests.support.waiting import wait_until

_PROGRAM = str(Path(sys.executable).parent / "nats-server")


class NatsServer:
    def __init__(self, folder: Path, config: str = "", disk: SmallDisk | None = None) -> None:
        self.folder = folder
        self.disk = disk
        self._config = config
        self.log = "log"
        """The name of the log that a test has there."""
        self.port = -1
        self.start()

    @property
    def server(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log_address(self) -> str:
        return self.address(self.log)

    def address(self, name: str, scheme: str = "nats") -> str:
        return f"{scheme}://{self.server}/{name}"

    def start(self) -> None:
        path = self.folder / "nats.conf"
        ports = f"listen: '{self.server}'\nports_file_dir: '{self.folder}'\n"
        path.write_text(ports + self._config)
        with (self.folder / "nats.log").open("ab") as log:
            before = self.disk.before if self.disk else ()
            self.process = subprocess.Popen([*before, _PROGRAM, "-c", str(path)], stderr=log, stdout=log)
        try:
            self.port = self._listening()
        except BaseException:  # a caller has no server yet that it could kill
            self.kill()
            raise

    def _listening(self) -> int:
        found = self.folder / f"nats-server_{self.process.pid}.ports"
        wait_until(lambda: self.process.poll() is not None or (found.exists() and found.read_text().endswith("}")))
        assert self.process.poll() is None, (self.folder / "nats.log").read_text()
        return int(json.loads(found.read_text())["nats"][0].rpartition(":")[2])

    @property
    def monitor(self) -> str:
        found = json.loads((self.folder / f"nats-server_{self.process.pid}.ports").read_text())
        return str(found["monitoring"][0].removeprefix("http://"))

    def pause(self) -> None:
        """Let it stand still, and return when all of its threads do."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
