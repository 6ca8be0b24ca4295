"""Speculation: counts of verified and accepted draft tokens."""

import numpy as np

from tokenbus_contracts import Limits, LogprobBatch

_SCHEMA = Limits.schema()
MOST_HEADS = _SCHEMA.max_draft_tokens_per_row
_TOKENS = _SCHEMA.max_tokens_per_row + 1


class Speculation:
    """Counts of the draft tokens of one worker.

    A row that emits n tokens has accepted n - 1 draft tokens, because the last token comes from the target model. Rows
    without verified draft tokens or without emitted tokens do not count.
    """

    def __init__(self) -> None:
        self._cells = np.zeros((MOST_HEADS + 1, _TOKENS), np.int64)
        """Number of rows for each pair of counts: verified draft tokens and emitted tokens."""

    def add(self, rows: LogprobBatch) -> None:
        # Counting a step in a table of (verified, emitted) is cheap; the sums are computed only when they are read.
        codes = np.multiply(rows.draft_token_counts, _TOKENS, dtype=np.uint16)
        codes += rows.token_counts
        self._cells += np.bincount(codes, minlength=self._cells.size).reshape(self._cells.shape)

    @property
    def rows(self) -> int:
        """Number of rows with both verified draft tokens and emitted tokens."""
        return int(self._cells[1:, 1:].sum())

    def heads(self) -> list[tuple[int, int, int]]:
        """Return (head, verified tokens, accepted tokens) for each active head, counted from 1."""
        found = (
            (head, int(self._cells[head:, 1:].sum()), int(self._cells[head:, head + 1 :].sum()))
            for head in range(1, MOST_HEADS + 1)
        )
        return [each for each in found if each[1]]
