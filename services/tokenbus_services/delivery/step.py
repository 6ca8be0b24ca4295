"""Step: what one forward pass of an engine emitted, whole and in original batch order."""

from dataclasses import dataclass, field

import numpy as np

from tokenbus_contracts import LogprobBatch, RowStatus
from tokenbus_services.delivery.ack_tracker import PendingAck
from tokenbus_services.delivery.token import TokenLists

FINISHED = frozenset({RowStatus.FINISHED_STOP, RowStatus.FINISHED_LENGTH, RowStatus.ABORTED, RowStatus.UNRECOVERABLE})
"""The statuses of a request's last row."""
LEAVES = np.isin(np.arange(256), [int(status) for status in (*FINISHED, RowStatus.HANDED_OFF)])
"""By status, whether a row with it is its request's last in this stream."""


@dataclass(slots=True, eq=False)
class Step:
    """One step of one stream. Each row in it is new to its request: repeated and foreign rows were taken out.

    Example:
        async with tokenbus.Processor() as processor:
            steps = processor.steps()  # each is a Step: step.target and step.draft are its columns
            await steps.aclose()
    """

    worker_id: str
    epoch: int
    number: int
    rows: LogprobBatch
    """All of the step's rows, in the order in which they came: handing rows to requests needs no other."""
    draft_rows: LogprobBatch | None
    """What the draft model proposed for them, its rows a selection of theirs, in some order."""
    pending_ack: PendingAck = field(repr=False)
    first_arrival: float = 0.0
    """When its first part arrived, by the processor's clock."""
    is_whole: bool = True
    """Whether every row of the step is known; the requests of others ended with an error."""
    is_explained: bool = True
    """Whether all rows that are missing are of items that are known to be lost, whose requests have ended."""
    _target: LogprobBatch | None = field(default=None, repr=False)
    _draft: LogprobBatch | None = field(default=None, repr=False)
    _token_lists: TokenLists | None = field(default=None, init=False, repr=False)

    @property
    def sequence(self) -> int:
        """The last sequence that belongs to it."""
        return self.pending_ack.last_sequence

    @property
    def target(self) -> LogprobBatch:
        """All of the step's rows, in original batch order."""
        # Put in order when it is read: that is most of a step's cost, and requests do not need it.
        if self._target is None:
            self._target = self.rows.in_batch_order()
        return self._target

    @property
    def draft(self) -> LogprobBatch | None:
        """What the draft model proposed for them, in original batch order."""
        if self._draft is None and self.draft_rows is not None:
            self._draft = self.draft_rows.in_batch_order()
        return self._draft

    @property
    def token_lists(self) -> TokenLists:
        """The tokens of all of its rows as plain numbers, which iterators over requests' tokens read."""
        if self._token_lists is None:
            self._token_lists = TokenLists(self.rows)
        return self._token_lists

    def keep(self, rows: LogprobBatch, draft_rows: LogprobBatch | None) -> None:
        """Have other rows from now on: what is left after some were taken out."""
        self.rows, self.draft_rows = rows, draft_rows
        self._target = self._draft = self._token_lists = None
