"""Two network namespaces with a cable between them, where the kernel permits such to its users."""

import subprocess
from collections.abc import Sequence
from typing import Self

from tests.support.permitted import why_not_permitted
from tests.support.waiting import MOST

_FIRST, _SECOND = "10.203.0.1", "10.203.0.2"


def why_no_cable() -> str:
    """Say why no cable between two namespaces can be made here; empty where it can. Any other failure is raised."""
    probe = ["unshare", "-rn", "ip", "link", "add", "name", "probe0", "type", "veth", "peer", "name", "probe1"]
    return why_not_permitted(probe, ("unshare", "nsenter", "ip"), "Unknown device type")


class TwoHosts:
    """Two namespaces, as two machines would be; both end with it."""

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[str]] = []
        self.address = _FIRST
        """Where the first is reached by the second."""
        self.first: list[str] = []
        """What runs a command in the first."""
        self.second: list[str] = []
        """What runs a command in the second."""

    def __enter__(self) -> Self:
        try:
            self.first = self._enter(self._hold(["unshare", "-rn"]))
            second = self._hold([*self.first, "unshare", "-n"])
            self.second = self._enter(second)
            ip = [*self.first, "ip"]
            _run([*ip, "link", "add", "name", "va", "type", "veth", "peer", "name", "vb", "netns", str(second)])
            for host, name, address in ((self.first, "va", _FIRST), (self.second, "vb", _SECOND)):
                _run([*host, "ip", "link", "set", "lo", "up"])
                _run([*host, "ip", "address", "add", f"{address}/24", "dev", name])
                _run([*host, "ip", "link", "set", name, "up"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait(MOST)
            if holder.stdout is not None:
                holder.stdout.close()

    def pull(self) -> None:
        _run([*self.first, "ip", "link", "set", "va", "down"])

    def plug(self) -> None:
        _run([*self.first, "ip", "link", "set", "va", "up"])

    def _hold(self, before: Sequence[str]) -> int:
        """Start what keeps a namespace; return its process id once it is in there."""
        command = [*before, "sh", "-c", "echo $$; exec sleep infinity"]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._holders.append(holder)
        if holder.stdout is None:
            raise RuntimeError("no output to read")
        return int(holder.stdout.readline())

    @staticmethod
    def _enter(holder: int) -> list[str]:
        return ["nsenter", "--target", str(holder), "--user", "--preserve-credentials", "--net"]


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=MOST)
