"""Engine: what a worker runs."""

from collections.abc import Sequence
from typing import Protocol

from tokenbus_contracts import LogprobBatch
from tokenbus_contracts.generated.request_pb2 import Generate


class Engine(Protocol):
    """Computes steps for the requests that it was given. One thread uses it."""

    @property
    def vocabulary_size(self) -> int:
        """How many token ids it has."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def admit(self, generate: Generate) -> int:
        """Take a request, and return how long its prompt is in tokens; a ValueError says what is wrong with it."""

    def abort(self, key: int) -> None:
        """End a request at the next step; one that is not known needs no end."""

    def step(self) -> Sequence[LogprobBatch]:
        """Compute a step, and return its batches in the order in which they are to be published."""
