"""Speculation: how many draft tokens were verified and accepted."""

import numpy as np

from tokenbus_contracts import Limits, LogprobBatch

_SCHEMA = Limits.schema()
MOST_HEADS = _SCHEMA.max_draft_tokens_per_row
_TOKENS = _SCHEMA.max_tokens_per_row + 1


class Speculation:
    """Counts of the draft tokens of one worker.

    If a row verified d draft tokens and emitted n tokens, it accepted n - 1 draft tokens: the last token is the target
    model's own. Rows that verified no draft token, or emitted nothing, do not count.
    """

    def __init__(self) -> None:
        self._cells = np.zeros((MOST_HEADS + 1, _TOKENS), np.int64)
        """The number of rows by verified draft tokens and by emitted tokens."""

    def add(self, rows: LogprobBatch) -> None:
        # One table of (drafted, emitted): counting a step takes microseconds, and the sums are computed when read.
        codes = np.multiply(rows.draft_token_counts, _TOKENS, dtype=np.uint16)
        codes += rows.token_counts
        self._cells += np.bincount(codes, minlength=self._cells.size).reshape(self._cells.shape)

    @property
    def rows(self) -> int:
        """Rows that verified draft tokens."""
        return int(self._cells[1:, 1:].sum())

    def heads(self) -> list[tuple[int, int, int]]:
        """Return for each active head, from 1, the head with its verified and its accepted tokens."""
        found = (
            (head, int(self._cells[head:, 1:].sum()), int(self._cells[head:, head + 1 :].sum()))
            for head in range(1, MOST_HEADS + 1)
        )
        return [each for each in found if each[1]]
