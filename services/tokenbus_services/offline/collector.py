"""Collector: the rows of steps, as they come, into the arrays of `Outputs`."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import LogprobBatch, RowStatus, Scoring
from tokenbus_contracts.schema import COLUMN
from tokenbus_services.offline.outputs import Outputs
from tokenbus_services.offline.texts import Texts

Array = npt.NDArray[Any]
Places = npt.NDArray[np.intp]
_OF_ROWS = ("request_keys", "positions", "token_counts", "scorings", "top_ks")
_OF_TOKENS = ("token_ids", "logprobs", "ranks", "alternative_token_ids", "alternative_logprobs")


class Collector:
    """Keeps rows as they come, without a Python object for a row or a token, and puts them in order at the end.

    The requests' ids follow one another, so that a row's id says which output it belongs to.
    """

    def __init__(self, first_id: int, count: int) -> None:
        self._first_id = first_id
        # A bytearray grows in place where it can, and becomes an array without a copy.
        self._columns = {name: bytearray() for name in (*_OF_ROWS, *_OF_TOKENS)}
        self._statuses = np.full(count, RowStatus.ACTIVE, np.uint8)
        self._stops: dict[int, int | str] = {}
        self.tokens = 0
        """How many tokens came."""

    def add(self, rows: LogprobBatch) -> None:
        """Add the rows of a step; those of one request come in order."""
        for name, column in self._columns.items():
            column.extend(getattr(rows, name))
        self.tokens += rows.token_ids.size

    def end(self, request_id: int, status: RowStatus, stop: int | str | None) -> None:
        """Note how a request ended, and by which of its own stops, if it was one."""
        self._statuses[request_id - self._first_id] = status
        if stop is not None:
            self._stops[request_id - self._first_id] = stop

    def outputs(self, n: int, texts: Texts) -> Outputs:
        """Return the outputs, `n` of each prompt."""
        keys, positions, counts, scorings, row_top_ks = map(self._column, _OF_ROWS)
        of_output = (keys - np.uint64(self._first_id)).astype(np.intp)
        offsets = np.zeros(self._statuses.size + 1, np.int64)
        np.add.at(offsets, of_output + 1, counts)
        np.cumsum(offsets, out=offsets)
        top_ks = np.zeros(self._statuses.size, np.uint8)
        np.maximum.at(top_ks, of_output, row_top_ks)

        # Where each token belongs, and how many alternatives it has.
        begins = np.cumsum(counts, dtype=np.intp) - counts
        places = np.repeat(offsets[of_output] + positions - begins, counts) + np.arange(self.tokens)
        token_top_ks = np.repeat(row_top_ks, counts)
        scored = places[np.repeat(scorings != Scoring.NONE, counts)]
        table = (self.tokens, int(top_ks.max(initial=0)))

        token_ids = np.zeros(self.tokens, np.uint32)
        token_ids[places] = self._column("token_ids")
        logprobs = ranks = None
        if scored.size:
            logprobs, ranks = np.full(self.tokens, np.nan, np.float32), np.zeros(self.tokens, np.uint32)
            logprobs[scored] = self._column("logprobs")
            ranks[scored] = self._column("ranks")
        alternative_token_ids, alternative_logprobs = np.zeros(table, np.uint32), np.full(table, np.nan, np.float32)
        _put_lines(alternative_token_ids, places, token_top_ks, self._column("alternative_token_ids"))
        _put_lines(alternative_logprobs, places, token_top_ks, self._column("alternative_logprobs"))
        return Outputs(
            n,
            offsets,
            token_ids,
            logprobs,
            ranks,
            alternative_token_ids,
            alternative_logprobs,
            top_ks,
            self._statuses,
            self._stops,
            texts,
        )

    def _column(self, name: str) -> Array:
        """Return a column, which is let go of here."""
        return np.frombuffer(self._columns.pop(name), COLUMN[name].dtype)


def _put_lines(into: Array, places: Places, top_ks: npt.NDArray[np.uint8], values: Array) -> None:
    """Put each token's alternatives, which follow one another in `values`, into the token's line."""
    begins = np.cumsum(top_ks, dtype=np.intp) - top_ks
    for top_k in np.unique(top_ks[top_ks > 0]).tolist():
        tokens = np.flatnonzero(top_ks == top_k)
        is_all = tokens.size * top_k == values.size
        lines = values.reshape(-1, top_k) if is_all else values[begins[tokens][:, None] + np.arange(top_k)]
        into[places[tokens], :top_k] = lines
