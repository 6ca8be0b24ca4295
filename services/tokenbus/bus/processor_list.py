"""ProcessorList: the addresses of a worker's or a client's processors, and which of them is next."""

from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b


class ProcessorList:
    """The addresses of processors, each tried in turn."""

    def __init__(self, addresses: Iterable[str], worker_id: str = "") -> None:
        """Take the addresses; a worker's id decides their order, so that workers spread."""
        self._addresses = sorted(addresses, key=lambda address: _rank(worker_id, address))
        self._tries: Counter[str] = Counter()
        """How often each was tried since the last welcome."""
        self.current = ""
        """The address that was chosen last."""

    def __len__(self) -> int:
        return len(self._addresses)

    def next(self) -> str:
        """Choose the next address: the first of those with the fewest tries."""
        self.current = min(self._addresses, key=lambda address: self._tries[address])
        self._tries[self.current] += 1
        return self.current

    def welcomed(self) -> None:
        """Learn that the processor at the current address took this peer: the others are tried before it next time."""
        self._tries = Counter([self.current])


def _rank(worker_id: str, address: str) -> bytes:
    return blake2b(f"{worker_id} {address}".encode(), digest_size=8).digest() if worker_id else b""
