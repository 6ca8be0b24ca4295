"""Engine: what a worker runs."""

from collections.abc import Sequence
from typing import Protocol

from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_services.worker.step import StepArrays


class EngineBrokenError(RuntimeError):
    """The engine says that no further step can succeed: its worker ends its requests, and stops."""


class Engine(Protocol):
    """Computes steps for the requests that it was given. One thread uses it.

    Whatever else `step` raises ends the requests that it had, which are aborted, and the engine goes on.
    """

    @property
    def vocabulary_size(self) -> int:
        """How many token ids it has."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def admit(self, generate: Generate, state: bytes | None = None) -> int:
        """Take a request, and return how long its prompt is in tokens; a ValueError says what is wrong with it.

        With a state it is one that a prefill engine handed off, to go on from there; it was made by an engine of the
        same kind, but it came over the network.
        """

    def abort(self, key: int) -> None:
        """End a request at the next step; one that is not known needs no end."""

    def step(self) -> Sequence[StepArrays]:
        """Compute a step, and return its batches in the order in which they are to be published."""

    def close(self) -> None:
        """Let go of what it holds; no other method is called afterwards."""
