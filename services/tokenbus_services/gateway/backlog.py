"""Backlog: steps that came from the bus and were not handed out yet, with what they hold of whose."""

from collections import Counter, deque
from collections.abc import Container
from typing import NamedTuple

import numpy as np

from tokenbus_contracts import LogprobBatch

_ROW_BYTES, _TOKEN_BYTES, _ALTERNATIVE_BYTES = 22, 12, 8
"""What a row, a token and an alternative take in a batch."""


class _Step(NamedTuple):
    target: LogprobBatch
    draft: LogprobBatch | None
    size: int


class Backlog:
    """First in, first out."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._steps: deque[_Step] = deque()
        self.size = 0
        """How many bytes wait."""

    def __len__(self) -> int:
        """Return how many steps wait."""
        return len(self._steps)

    def append(self, target: LogprobBatch, draft: LogprobBatch | None) -> None:
        """Add what one step brought."""
        size = int(_sizes(target).sum()) + (0 if draft is None else int(_sizes(draft).sum()))
        self._steps.append(_Step(target, draft, size))
        self.size += size

    def popleft(self) -> tuple[LogprobBatch, LogprobBatch | None]:
        """Return the step that has waited the longest."""
        target, draft, size = self._steps.popleft()
        self.size -= size
        return target, draft

    def weights(self) -> Counter[int]:
        """Return how many bytes wait for each request."""
        weights: Counter[int] = Counter()
        for batch in (batch for step in self._steps for batch in step[:2] if batch is not None):
            weights.update(dict(zip(batch.request_keys.tolist(), _sizes(batch).tolist(), strict=True)))
        return weights

    def keep(self, wanted: Container[int]) -> None:
        """Free the rows of requests that are not wanted any more."""
        steps, self._steps = self._steps, deque()
        self.size = 0
        for target, draft, _ in steps:
            kept = selected(target, wanted)
            if kept is not None:
                self.append(kept, None if draft is None else selected(draft, wanted))


def selected(batch: LogprobBatch, wanted: Container[int]) -> LogprobBatch | None:
    """Return the rows of a batch that are wanted, or None: there is none."""
    places = [place for place, key in enumerate(batch.request_keys.tolist()) if key in wanted]
    if len(places) == batch.row_count:
        return batch
    return batch.select(places) if places else None


def _sizes(batch: LogprobBatch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    tokens = batch.token_counts.astype(np.int64)
    return _ROW_BYTES + tokens * (_TOKEN_BYTES + _ALTERNATIVE_BYTES * batch.top_ks.astype(np.int64))
