"""Speculation: how many draft tokens were verified and accepted."""

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import Limits, LogprobBatch

_SCHEMA = Limits.schema()
MOST_HEADS = _SCHEMA.max_draft_tokens_per_row
_TOKENS = _SCHEMA.max_tokens_per_row + 1
_CELLS = (MOST_HEADS + 1) * _TOKENS
# The numbers of verified draft tokens and of emitted tokens that each cell of the table counts rows of.
_DRAFTED, _EMITTED = np.divmod(np.arange(_CELLS), _TOKENS)
_COUNTS = (_DRAFTED > 0) & (_EMITTED > 0)
_ACCEPTED = np.minimum(_EMITTED - 1, _DRAFTED)


class Speculation:
    """Counts of the draft tokens of one worker.

    A row that verified d draft tokens and emitted n tokens accepted n - 1 of them: the last token is the target
    model's own. Rows that verified no draft token, or emitted nothing, do not count.
    """

    def __init__(self) -> None:
        self._cells: npt.NDArray[np.int64] = np.zeros(_CELLS, np.int64)

    def add(self, rows: LogprobBatch) -> None:
        # One table of (drafted, emitted): counting a step takes microseconds, and the sums are computed when read.
        codes = np.multiply(rows.draft_token_counts, _TOKENS, dtype=np.uint16)
        codes += rows.token_counts
        self._cells += np.bincount(codes, minlength=_CELLS)

    @property
    def rows(self) -> int:
        """Rows that verified draft tokens."""
        return self._sum(np.int64(1))

    def heads(self) -> list[tuple[int, int, int]]:
        """Return for each active head, from 1, the head with its verified and its accepted tokens."""
        found = ((head, self._sum(head <= _DRAFTED), self._sum(head <= _ACCEPTED)) for head in range(1, MOST_HEADS + 1))
        return [each for each in found if each[1]]

    def _sum(self, weights: npt.NDArray[np.int64] | npt.NDArray[np.bool_] | np.int64) -> int:
        return int((self._cells * (_COUNTS * weights)).sum())
