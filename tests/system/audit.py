"""What a request was given, compared with what is true of it."""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from tokenbus.delivery import RequestFailedError
from tokenbus.engines import synthetic
from tokenbus_contracts import Row, Scoring


@dataclass(slots=True)
class Audit:
    """One request: how far it has come, and what was not as it should be."""

    key: int
    position: int = 0
    lost: int = 0
    """Tokens that were left out."""
    repeated: int = 0
    """Tokens that came before."""
    wrong: int = 0
    """Rows whose tokens, logprobs, ranks or alternatives are not the true ones."""
    error: RequestFailedError | None = None
    _delivered: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    _true: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def take(self, row: Row) -> None:
        self.lost += max(0, row.position - self.position)
        self.repeated += max(0, self.position - row.position)
        end = row.position + row.token_ids.size
        scored = row.scoring is not Scoring.NONE
        self._delivered.update(row.token_ids.tobytes() + row.logprobs.tobytes())
        true = synthetic.true_tokens(self.key, self.position, end)
        self._true.update(true.ids.tobytes() + (true.logprobs.tobytes() if scored else b""))
        self.wrong += not _is_true(self.key, row)
        self.position = end

    @property
    def delivered(self) -> str:
        return self._delivered.hexdigest()

    @property
    def true(self) -> str:
        return self._true.hexdigest()

    @property
    def is_exact(self) -> bool:
        """Whether everything that came is what should have come up to here: nothing less, more or else."""
        return not (self.lost or self.repeated or self.wrong) and self.delivered == self.true


def _is_true(key: int, row: Row) -> bool:
    count = row.token_ids.size
    keys = np.full(count, key, np.uint64)
    numbers = synthetic.draws(keys, np.arange(row.position, row.position + count, dtype=np.uint64))
    tokens = synthetic.sampled(numbers)
    top_k = row.alternative_token_ids.shape[1]
    ids, logprobs = synthetic.alternatives(numbers, np.full(count, top_k))
    scored = row.scoring is not Scoring.NONE
    return (
        np.array_equal(row.token_ids, tokens.ids)
        and np.array_equal(row.logprobs, tokens.logprobs if scored else tokens.logprobs[:0])
        and np.array_equal(row.ranks, tokens.ranks if scored else tokens.ranks[:0])
        and np.array_equal(row.alternative_token_ids.ravel(), ids)
        and np.array_equal(row.alternative_logprobs.ravel(), logprobs)
    )
