"""Step: what one forward pass of an engine emitted, whole and in original batch order."""

from dataclasses import dataclass, field

from tokenbus_contracts import LogprobBatch
from tokenbus_services.delivery.holds import Hold


@dataclass(slots=True, eq=False)
class Step:
    """One step of one stream. Each row in it is new to its request: repeated and foreign rows were taken out."""

    worker_id: str
    epoch: int
    number: int
    target: LogprobBatch
    """All of the step's rows, in original batch order."""
    draft: LogprobBatch | None
    """What the draft model proposed for them, its rows a selection of the target's."""
    hold: Hold = field(repr=False)
    first_arrival: float = 0.0
    """When its first part arrived, by the processor's clock."""
    is_whole: bool = True
    """Whether every row of the step is known; the requests of others ended with an error."""

    @property
    def sequence(self) -> int:
        """The last sequence that belongs to it."""
        return self.hold.last_sequence
