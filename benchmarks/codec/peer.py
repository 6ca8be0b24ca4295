"""What a peer is: one way from a step's arrays to every request's queue."""

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

from benchmarks.workload import Share, Step

Queues = dict[Hashable, deque[Any]]


class Peer:
    """One line of the tables. `carry` is all that is timed."""

    label: ClassVar[str]

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Self]:
        """Yield the peer, or raise a NotRunError where it cannot run."""
        yield cls()

    def prepare(self, steps: Sequence[Step]) -> None:
        """Make, untimed, the parts that do not belong to the way itself."""

    def addresses(self, step: Step) -> Sequence[Hashable]:
        """Return this peer's names of the step's requests, in row order."""
        return step.keys

    def carry(self, step: Step, queues: Queues) -> int:
        """Take one step from its arrays to its requests' queues, and return the bytes of its message."""
        raise NotImplementedError

    def plain(self, delivered: Any, top_k: int) -> Share:  # noqa: ANN401 - each peer delivers its own kind
        """Return, untimed, what a request was given as plain lists, cut to what it asked for."""
        raise NotImplementedError

    def deliver(self, step: Step) -> list[Share]:
        """Return, untimed, what every request of a step gets through this peer, in row order."""
        queues: Queues = {address: deque() for address in self.addresses(step)}
        self.carry(step, queues)
        return [
            self.plain(queues[address].popleft(), top_k)
            for address, top_k in zip(self.addresses(step), step.top_ks, strict=True)
        ]
