"""How well a draft model guesses, counted from what every step says of its rows."""

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import Limits, LogprobBatch

_SCHEMA = Limits.schema()
MOST_HEADS = _SCHEMA.max_draft_tokens_per_row
_TOKENS = _SCHEMA.max_tokens_per_row + 1
_CELLS = (MOST_HEADS + 1) * _TOKENS
# What each cell of the table stands for: so many draft tokens verified, so many tokens emitted.
_DRAFTED, _EMITTED = np.divmod(np.arange(_CELLS), _TOKENS)
_COUNTS = (_DRAFTED > 0) & (_EMITTED > 0)
_ACCEPTED = np.minimum(_EMITTED - 1, _DRAFTED)


class Speculation:
    """What became of the draft tokens of one worker.

    A row that verified d draft tokens and emitted n tokens accepted n - 1 of them: the last token is the target
    model's own. Rows that verified none, or emitted nothing, say nothing about the draft model and do not count.
    """

    def __init__(self) -> None:
        self._cells: npt.NDArray[np.int64] = np.zeros(_CELLS, np.int64)

    def add(self, rows: LogprobBatch) -> None:
        """Count the rows of a step."""
        # One table of (drafted, emitted): a step costs a few microseconds, and everything else is computed when read.
        codes = np.multiply(rows.draft_token_counts, _TOKENS, dtype=np.uint16)
        codes += rows.token_counts
        self._cells += np.bincount(codes, minlength=_CELLS)

    @property
    def rows(self) -> int:
        """How many rows verified draft tokens."""
        return self._sum(np.int64(1))

    def heads(self) -> list[tuple[int, int, int]]:
        """Return each head that drafted, from 1, with how many of its tokens were verified and how many accepted."""
        found = ((head, self._sum(head <= _DRAFTED), self._sum(head <= _ACCEPTED)) for head in range(1, MOST_HEADS + 1))
        return [each for each in found if each[1]]

    def _sum(self, weights: npt.NDArray[np.int64] | npt.NDArray[np.bool_] | np.int64) -> int:
        return int((self._cells * (_COUNTS * weights)).sum())
