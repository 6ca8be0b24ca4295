"""Progress: arrays with the next position of each open request, for comparing all rows of a step at once."""

from collections import deque

import numpy as np
import numpy.typing as npt

from tokenbus.client.accepted_tokens import AcceptedTokens, Ids
from tokenbus.delivery.slots import SlotMap, Slots
from tokenbus.delivery.step import Step
from tokenbus_contracts import LogprobBatch, RowStatus

MOST_POSITION = 2**31 - 1
"""Largest position that a Resume can name; a row may end beyond this position."""
NO_SENDER = 0
_ACTIVE = int(RowStatus.ACTIVE)


class Progress:
    """The next position, the sending session and the row buffer of each open request."""

    def __init__(self) -> None:
        self._slots = SlotMap()
        self._positions = np.zeros(64, np.int64)
        self._senders = np.full(64, NO_SENDER, np.int64)
        self._serials = np.zeros(64, np.int64)
        self._opened = 0
        self._accepted = AcceptedTokens()
        self.waiting: list[deque[tuple[Step, int]]] = []
        """Buffers of unread rows, by slot."""

    def open(self, request_id: int, position: int, waiting: deque[tuple[Step, int]]) -> None:
        """Add a request; its rows are accepted once `set_sender` names a session."""
        slot = self._slots.add(request_id)
        if slot == len(self.waiting):
            self.waiting.append(waiting)
            if slot == self._positions.size:
                self._positions = np.resize(self._positions, 2 * slot)
                self._senders = np.resize(self._senders, 2 * slot)
                self._serials = np.resize(self._serials, 2 * slot)
        self.waiting[slot] = waiting
        self._positions[slot], self._senders[slot] = position, NO_SENDER
        self._opened += 1
        self._serials[slot] = self._opened
        self._accepted.open(self._opened)

    def close(self, request_id: int) -> int:
        """Forget a request and its buffer, and return the request's next position."""
        position = self.next_position(request_id)
        slot = self._slots[request_id]
        self.waiting[slot] = deque(maxlen=0)
        self._accepted.close(int(self._serials[slot]), position)
        self._slots.remove(request_id)
        return position

    def next_position(self, request_id: int) -> int:
        return int(self._positions[self._slots[request_id]])

    def go_on(self, request_id: int, token_ids: Ids, *, is_last: bool) -> None:
        """Count a row's new tokens; the tokens of a request's last row are not stored, because no turn follows."""
        slot = self._slots[request_id]
        self._positions[slot] += token_ids.size
        if not is_last:
            self._accepted.add(self._serials[slot : slot + 1].copy(), np.array([token_ids.size]), token_ids)

    def accepted(self, request_id: int) -> Ids:
        """Return all tokens of a request since it was opened."""
        return self._accepted.of(int(self._serials[self._slots[request_id]]))

    def set_sender(self, request_id: int, sender: int) -> None:
        """Accept a request's rows only from the session `sender`; with NO_SENDER, accept none."""
        self._senders[self._slots[request_id]] = sender

    def advance(self, sender: int, target: LogprobBatch) -> tuple[Slots, npt.NDArray[np.bool_]]:
        """Count the rows that continue their requests; return the slot of each row, and a mask of the counted rows.

        Other rows change nothing, because the caller handles each of them separately.
        """
        slots = self._slots.find(target.request_ids)
        ends = target.positions + target.token_counts
        is_next: npt.NDArray[np.bool_] = (
            (self._positions[slots] == target.positions)
            & (self._senders[slots] == sender)
            & (target.statuses == _ACTIVE)
            & (target.token_counts > 0)
            & (ends <= MOST_POSITION)
            & (slots >= 0)
        )
        going_on, counts = slots[is_next], target.token_counts
        if going_on.size:
            mine = target.token_ids if is_next.all() else target.token_ids[np.repeat(is_next, counts)]
            self._accepted.add(self._serials[going_on], counts[is_next], mine)
        self._positions[going_on] = ends[is_next]
        return slots, is_next
