"""Backlog: steps and ends that came from the bus and were not handed out yet, and how many bytes each request has."""

from collections import Counter, deque
from collections.abc import Container
from typing import NamedTuple

import numpy as np

from tokenbus_contracts import LogprobBatch
from tokenbus_services.client import RequestEnd, StepRows

_ROW_BYTES, _TOKEN_BYTES, _ALTERNATIVE_BYTES = 22, 12, 8
"""What a row, a token and an alternative take in a batch."""


class _Entry(NamedTuple):
    output: StepRows | RequestEnd
    size: int


class Backlog:
    """First in, first out."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._entries: deque[_Entry] = deque()
        self.size = 0
        """How many bytes wait."""

    def __len__(self) -> int:
        """Return how many steps and ends wait."""
        return len(self._entries)

    def append(self, output: StepRows | RequestEnd) -> None:
        """Add a step's rows, or a request's end."""
        batches = () if isinstance(output, RequestEnd) else output
        size = sum(int(_sizes(batch).sum()) for batch in batches if batch is not None)
        self._entries.append(_Entry(output, size))
        self.size += size

    def popleft(self) -> StepRows | RequestEnd:
        """Return what has waited the longest."""
        output, size = self._entries.popleft()
        self.size -= size
        return output

    def weights(self) -> Counter[int]:
        """Return how many bytes wait for each request."""
        weights: Counter[int] = Counter()
        steps = (output for output, _ in self._entries if isinstance(output, StepRows))
        for batch in (batch for step in steps for batch in step if batch is not None):
            weights.update(dict(zip(batch.request_keys.tolist(), _sizes(batch).tolist(), strict=True)))
        return weights

    def keep(self, wanted: Container[int]) -> None:
        """Free the rows of requests that are not wanted any more."""
        entries, self._entries = self._entries, deque()
        self.size = 0
        for output, _ in entries:
            if isinstance(output, RequestEnd):
                self.append(output)
                continue
            target, draft = output
            kept = selected(target, wanted)
            if kept is not None:
                self.append(StepRows(kept, None if draft is None else selected(draft, wanted)))


def selected(batch: LogprobBatch, wanted: Container[int]) -> LogprobBatch | None:
    """Return the rows of a batch that are wanted, or None: there is none."""
    places = [place for place, key in enumerate(batch.request_keys.tolist()) if key in wanted]
    if len(places) == batch.row_count:
        return batch
    return batch.select(places) if places else None


def _sizes(batch: LogprobBatch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    tokens = batch.token_counts.astype(np.int64)
    return _ROW_BYTES + tokens * (_TOKEN_BYTES + _ALTERNATIVE_BYTES * batch.top_ks.astype(np.int64))
