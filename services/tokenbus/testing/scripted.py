"""ScriptedEngine: answers requests with the tokens, logprobs, drafts and failures of a script."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, TypeVar

from tokenbus.worker import EngineBrokenError, EngineStepError, StepArrays
from tokenbus_contracts import BatchKind, RowStatus, SpeculativeMethod
from tokenbus_contracts.extras import Extra
from tokenbus_contracts.generated.request_pb2 import Generate, TokenScoring

T = TypeVar("T")
_Columns = dict[str, list[Any]]
Alternative = tuple[int, float]
"""A token id and its logprob."""
_OF_TOKENS = ("logprobs", "ranks", "alternatives", "other_logprobs", "entropies", "given_logprobs", "masks")
_UNLIKELY = -10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a ScriptedEngine to one request.

    Example:
        answer = tokenbus.testing.Answer(tokens=[5, 6, 7], logprobs=[-0.1, -2.0, -0.3], fails_after=2)
    """

    tokens: Sequence[int]
    """The ids of all tokens. A lower `max_tokens` of the request truncates the answer."""
    logprobs: Sequence[float] | float = -0.5
    """The logprob of each token, or one value for all tokens."""
    ranks: Sequence[int] | int = 1
    """The rank of each token, or one value for all tokens."""
    alternatives: Sequence[Sequence[Alternative]] | None = None
    """The alternatives of each token, most probable first, or None to generate values that fit logprob and rank."""
    other_logprobs: Sequence[float] | float = -0.5
    """The other logprob of each token, or one value for all tokens.

    Only requests that ask for other logprobs, entropies, given logprobs or masks get these values.
    """
    entropies: Sequence[float] | float = 1.0
    """The entropy at each token, or one value for all tokens."""
    given_logprobs: Sequence[Mapping[int, float]] | Mapping[int, float] = field(default_factory=dict)
    """The logprobs for `logprob_token_ids`, one mapping per token or one for all tokens. Missing ids get -10."""
    masks: Sequence[Sequence[int]] | None = None
    """The ids that sampling could choose for each token, or None for only the token itself."""
    tokens_per_step: int = 1
    drafts: Sequence[Sequence[Alternative]] = ()
    """The draft model's proposals with logprobs for each step. Only requests that ask for drafts get proposals."""
    status: RowStatus = RowStatus.FINISHED_STOP
    """The final status, FINISHED_STOP or FINISHED_LENGTH. For errors, use `fails_after`."""
    fails_after: int | None = None
    """The number of tokens after which a step ends this request with an error, or None."""
    breaks_after: int | None = None
    """The number of tokens after which the engine breaks, or None. All requests and the worker then end."""
    error: str = "as the script demands"


class ScriptedEngine:
    """An engine that gives each request the next answer, or the result of the function `answer`.

    Example:
        engine = tokenbus.testing.ScriptedEngine(tokenbus.testing.Answer(tokens=[5, 6, 7]))
        async with tokenbus.testing.bus(engine) as bus:
            assert [token.id async for token in bus.client.generate([1])] == [5, 6, 7]
    """

    token_scores = frozenset(TokenScoring.DESCRIPTOR.fields_by_name)

    def __init__(
        self, *answers: Answer, answer: Callable[[Generate], Answer] | None = None, vocabulary_size: int = 50_000
    ) -> None:
        self.vocabulary_size = vocabulary_size
        self.admitted: list[Generate] = []
        self.aborted: list[int] = []
        """The ids of aborted and failed requests."""
        self._answers = iter(answers)
        self._answer = answer or self._next
        self._rows: dict[int, _Row] = {}

    def _next(self, generate: Generate) -> Answer:
        found = next(self._answers, None)
        if found is None:
            raise ValueError(f"the script has no answer for request {generate.request_id}: it has too few answers")
        return found

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    def admit(self, generate: Generate) -> int:
        self._rows[generate.request_id] = _Row(generate, self._answer(generate), self.vocabulary_size)
        self.admitted.append(generate)
        return max(1, len(generate.tokens.token_ids) or len(generate.text.text))

    def abort(self, key: int) -> None:
        """End a request at the next step with the status ABORTED."""
        self.aborted.append(key)
        if key in self._rows:
            self._rows[key].is_aborted = True

    def step(self) -> Sequence[StepArrays]:
        rows = list(self._rows.values())
        if broken := [row for row in rows if row.has_reached(row.answer.breaks_after)]:
            raise EngineBrokenError(broken[0].answer.error)
        if failed := [row for row in rows if row.has_reached(row.answer.fails_after)]:
            for row in failed:
                del self._rows[row.key]
            raise EngineStepError(failed[0].answer.error, [row.key for row in failed])
        has_extras = any(row.scoring.ListFields() for row in rows)
        method = SpeculativeMethod.MTP if any(row.answer.drafts for row in rows) else SpeculativeMethod.NONE
        steps = [StepArrays(**_joined([row.columns(has_extras=has_extras) for row in rows]), method=method)]
        if any(row.draft for row in rows):
            steps[0].draft_follows = True
            drafts = _joined([row.draft_columns() for row in rows])
            steps.append(StepArrays(**drafts, kind=BatchKind.DRAFT, method=SpeculativeMethod.MTP))
        for row in rows:
            if row.status is not RowStatus.ACTIVE:
                del self._rows[row.key]
            row.advance()
        return steps

    def close(self) -> None:
        self._rows.clear()


class _Row:
    def __init__(self, generate: Generate, answer: Answer, vocabulary_size: int) -> None:
        self.key, self.answer = generate.request_id, answer
        self.is_scored = generate.HasField("top_logprobs")
        self.top_k = generate.top_logprobs if self.is_scored else 0
        self.scoring = generate.token_scoring
        self.position, self.is_aborted = 0, False
        self._vocabulary_size = vocabulary_size
        self._step = 0
        limit = generate.sampling.max_tokens if generate.sampling.HasField("max_tokens") else len(answer.tokens)
        self._size = min(len(answer.tokens), limit)
        for name in _OF_TOKENS:
            values = getattr(answer, name)
            if isinstance(values, Sequence) and len(values) != len(answer.tokens):
                raise ValueError(f"answer.{name}: {len(answer.tokens)}, one per token, got {len(values)}")
        if answer.status not in {RowStatus.FINISHED_STOP, RowStatus.FINISHED_LENGTH}:
            raise ValueError(f"answer.status: FINISHED_STOP or FINISHED_LENGTH, got {RowStatus(answer.status).name}")
        if answer.tokens_per_step < 1:
            raise ValueError(f"answer.tokens_per_step: at least 1, got {answer.tokens_per_step}")
        for name in ("fails_after", "breaks_after"):
            place = getattr(answer, name)
            if place is not None and not 0 <= place < self._size:
                raise ValueError(f"answer.{name}: below {self._size}, its number of tokens, got {place}")
        fewest = min(map(len, answer.alternatives or ()), default=self.top_k)
        if fewest < self.top_k:
            raise ValueError(f"answer.alternatives: {self.top_k} per token, as the request asks, got {fewest}")

    @property
    def count(self) -> int:
        until = [each for each in (self.answer.fails_after, self.answer.breaks_after) if each is not None]
        return 0 if self.is_aborted else min(self.answer.tokens_per_step, min([self._size, *until]) - self.position)

    @property
    def status(self) -> RowStatus:
        if self.is_aborted:
            return RowStatus.ABORTED
        if self.position + self.count < self._size:
            return RowStatus.ACTIVE
        return self.answer.status if self._size == len(self.answer.tokens) else RowStatus.FINISHED_LENGTH

    @property
    def draft(self) -> Sequence[Alternative]:
        return () if self.is_aborted else next(islice(self.answer.drafts, self._step, None), ())

    def has_reached(self, position: int | None) -> bool:
        return position is not None and self.position >= position and not self.is_aborted

    def advance(self) -> None:
        self.position += self.count
        self._step += 1

    def positions(self) -> range:
        return range(self.position, self.position + self.count)

    def tokens(self) -> Iterator[tuple[int, float, int, Sequence[Alternative]]]:
        """Yield the id, logprob, rank and alternatives of each token of the next step."""
        answer = self.answer
        for position in self.positions():
            token, logprob, rank = answer.tokens[position], _at(position, answer.logprobs), _at(position, answer.ranks)
            given = None if answer.alternatives is None else answer.alternatives[position]
            yield token, logprob, rank, (given or self._generated(token, logprob, rank))[: self.top_k]

    def _generated(self, token: int, logprob: float, rank: int) -> Sequence[Alternative]:
        ids = [(token + 1 + index) % self._vocabulary_size for index in range(self.top_k)]
        values = [logprob * (index + 1) / rank for index in range(min(rank, self.top_k))]
        values += [logprob - 0.25 * (index + 1) for index in range(self.top_k - rank)]
        if rank <= self.top_k:
            ids[rank - 1] = token
        return list(zip(ids, values, strict=True))

    def columns(self, *, has_extras: bool) -> _Columns:
        """Return the columns of this row in the next step."""
        tokens = list(self.tokens())
        scored = tokens if self.is_scored else []
        columns: _Columns = {
            "request_ids": [self.key],
            "positions": [self.position],
            "token_counts": [self.count],
            "token_ids": [token for token, *_ in tokens],
            "statuses": [self.status],
            "logprobs": [logprob for _, logprob, *_ in scored],
            "ranks": [rank for _, _, rank, _ in scored],
            "alternative_token_ids": [token for *_, others in scored for token, _ in others],
            "alternative_logprobs": [logprob for *_, others in scored for _, logprob in others],
            "scored": [self.is_scored],
            "top_ks": [self.top_k],
            "draft_token_counts": [len(self.draft)],
        }
        return columns | self._extras() if has_extras else columns

    def _extras(self) -> _Columns:
        answer, scoring, places = self.answer, self.scoring, self.positions()
        masks = [sorted(answer.masks[place] if answer.masks else [answer.tokens[place]]) for place in places]
        return {
            "extras": [scoring.other_logprobs * Extra.OTHER_LOGPROB + scoring.entropies * Extra.ENTROPY],
            "other_logprobs": [_at(place, answer.other_logprobs) for place in places],
            "entropies": [_at(place, answer.entropies) for place in places],
            "given_counts": [len(scoring.token_ids)],
            "given_token_ids": list(scoring.token_ids),
            "given_logprobs": [
                _at(place, answer.given_logprobs).get(token, _UNLIKELY)
                for place in places
                for token in scoring.token_ids
            ],
            "mask_bounds": [scoring.mask_bound],
            "mask_sizes": [len(mask) for mask in masks],
            "mask_token_ids": [token for mask in masks if len(mask) <= scoring.mask_bound for token in mask],
        }

    def draft_columns(self) -> _Columns:
        """Return the columns of this row in the draft batch of the next step."""
        scored = self.draft if self.is_scored else ()
        return {
            "request_ids": [self.key],
            "positions": [self.position],
            "token_counts": [len(self.draft)],
            "token_ids": [token for token, _ in self.draft],
            "logprobs": [logprob for _, logprob in scored],
            "ranks": [1] * len(scored),
            "scored": [self.is_scored],
        }


def _joined(rows: Sequence[_Columns]) -> dict[str, Any]:
    """Return the concatenated columns of all rows."""
    return {name: list(chain.from_iterable(row[name] for row in rows)) for name in rows[0]}


def _at(place: int, values: Sequence[T] | T) -> T:
    """Return the value at an index of a sequence, or a value that holds for all indexes."""
    return values[place] if isinstance(values, Sequence) else values
