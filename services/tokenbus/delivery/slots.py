"""SlotMap: gives each open request a small number, which is its index in the columns of a table."""

from collections.abc import Iterator
from itertools import repeat

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.intp]


class SlotMap:
    """The slot of each open request; after the request has ended, its slot is reused."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._cached_ids: bytes | None = None
        self._cached_slots: Slots = np.zeros(0, np.intp)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._slots

    def __getitem__(self, request_id: int) -> int:
        return self._slots[request_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots.values())  # slots in the order in which the requests were added

    def get(self, request_id: int) -> int | None:
        return self._slots.get(request_id)

    def add(self, request_id: int) -> int:
        """Add a request, and return its slot: a free slot, or a new slot after all others."""
        slot = self._free.pop() if self._free else len(self._slots)
        self._slots[request_id] = slot
        self._cached_ids = None
        return slot

    def remove(self, request_id: int) -> None:
        self._free.append(self._slots.pop(request_id))
        self._cached_ids = None

    def find(self, request_ids: npt.NDArray[np.uint64]) -> Slots:
        """Return the slot of each request, or -1 for a request that is not open."""
        contents = request_ids.tobytes()
        # The result is cached, because most steps have the same requests as the previous step.
        if contents != self._cached_ids:
            found = map(self._slots.get, request_ids.tolist(), repeat(-1))
            self._cached_slots = np.fromiter(found, np.intp, request_ids.size)
            self._cached_ids = contents
        return self._cached_slots
