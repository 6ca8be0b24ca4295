"""An example worker whose engine is a Markov chain over letters, written as another company would write it."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

import tokenbus

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
END = LETTERS.index(".")


@dataclass
class Running:
    """A request that the engine has admitted and not finished."""

    letter: int
    position: int
    limit: int
    top_k: int
    is_scored: bool
    random: np.random.Generator
    is_aborted: bool = False


class MarkovEngine:
    """Draws each letter by how often it follows the previous letter; a full stop ends a request."""

    vocabulary_size = len(LETTERS)

    def __init__(self, text: str) -> None:
        follows: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for before, after in pairwise(text):
            follows[LETTERS.index(before)][LETTERS.index(after)] += 1
        counts = np.array([[1 + follows[one][other] for other in range(len(LETTERS))] for one in range(len(LETTERS))])
        self.logprobs = np.log(counts / counts.sum(axis=1, keepdims=True))
        self.running: dict[int, Running] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def admit(self, generate: tokenbus.Generate) -> int:
        prompt = list(generate.tokens.token_ids)
        if not prompt or max(prompt) >= self.vocabulary_size:
            raise ValueError(f"tokens: ids from 0 to {self.vocabulary_size - 1}, at least one, got {prompt[:8]}")
        sampling = generate.sampling
        self.running[generate.request_id] = Running(
            letter=prompt[-1],
            position=0,
            limit=sampling.max_tokens if sampling.HasField("max_tokens") else 1000,
            top_k=generate.top_logprobs,
            is_scored=generate.HasField("top_logprobs"),
            random=np.random.default_rng(sampling.seed if sampling.HasField("seed") else None),
        )
        return len(prompt)

    def step(self) -> list[tokenbus.StepArrays]:
        rows = {key: row for key, row in self.running.items() if not row.is_aborted}
        ends = [key for key, row in self.running.items() if row.is_aborted]
        drawn = {
            key: int(row.random.choice(self.vocabulary_size, p=np.exp(self.logprobs[row.letter])))
            for key, row in rows.items()
        }
        columns = [self._columns(row, drawn[key]) for key, row in rows.items() if row.is_scored]
        step = tokenbus.StepArrays(
            request_ids=[*rows, *ends],
            positions=[self.running[key].position for key in (*rows, *ends)],
            token_counts=[1] * len(rows) + [0] * len(ends),
            token_ids=list(drawn.values()),
            statuses=[self._status(row, drawn[key]) for key, row in rows.items()]
            + [tokenbus.RowStatus.ABORTED] * len(ends),
            scored=[self.running[key].is_scored for key in (*rows, *ends)],
            logprobs=[logprob for logprob, *_ in columns],
            ranks=[rank for _, rank, *_ in columns],
            top_ks=[self.running[key].top_k for key in (*rows, *ends)],
            alternative_token_ids=[token for *_, tokens, _ in columns for token in tokens],
            alternative_logprobs=[logprob for *_, logprobs in columns for logprob in logprobs],
        )
        for key, row in list(self.running.items()):
            if row.is_aborted or self._status(row, drawn[key]) is not tokenbus.RowStatus.ACTIVE:
                del self.running[key]
            else:
                row.letter, row.position = drawn[key], row.position + 1
        return [step]

    def abort(self, key: int) -> None:
        if key in self.running:
            self.running[key].is_aborted = True

    def close(self) -> None:
        self.running.clear()

    def _columns(self, row: Running, token: int) -> tuple[float, int, list[int], list[float]]:
        """Return a token's logprob, its rank, and the ids and logprobs of its alternatives, most probable first."""
        values = self.logprobs[row.letter].astype(np.float32)
        order = np.lexsort((np.arange(values.size), -values))
        best = order[: row.top_k]
        return float(values[token]), int((values > values[token]).sum()) + 1, best.tolist(), values[best].tolist()

    def _status(self, row: Running, token: int) -> tokenbus.RowStatus:
        if token == END:
            return tokenbus.RowStatus.FINISHED_STOP
        return tokenbus.RowStatus.ACTIVE if row.position + 1 < row.limit else tokenbus.RowStatus.FINISHED_LENGTH


if __name__ == "__main__":
    tokenbus.run_engine(MarkovEngine("the quick brown fox jumps over the lazy dog. the dog sleeps."))
