"""TakenOver: a request that another worker began."""

from collections.abc import Callable
from dataclasses import dataclass

from tokenbus_contracts.generated.request_pb2 import Generate


@dataclass(frozen=True, slots=True)
class TakenOver:
    """A request to go on with, and where to say whether the engine does."""

    generate: Generate
    state: bytes
    answer: Callable[[str], None]
    """Takes why not, or nothing; any thread may call it."""
