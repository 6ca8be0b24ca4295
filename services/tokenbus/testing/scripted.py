"""ScriptedEngine: answers requests with the tokens, logprobs, drafts and failures that a test wrote down."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from tokenbus.worker import EngineBrokenError, EngineStepError, StepArrays
from tokenbus_contracts import BatchKind, RowStatus, SpeculativeMethod
from tokenbus_contracts.extras import Extra
from tokenbus_contracts.generated.request_pb2 import Generate, TokenScoring

T = TypeVar("T")
Alternative = tuple[int, float]
"""A token's id and its logprob."""
_OF_TOKENS = ("logprobs", "ranks", "alternatives", "other_logprobs", "entropies", "given_logprobs", "masks")
_UNLIKELY = -10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a ScriptedEngine answers one request with.

    Example:
        answer = tokenbus.testing.Answer(tokens=[5, 6, 7], logprobs=[-0.1, -2.0, -0.3], fails_after=2)
    """

    tokens: Sequence[int]
    """All that it gets, unless its `max_tokens` is less."""
    logprobs: Sequence[float] | float = -0.5
    """Of each token, or of all."""
    ranks: Sequence[int] | int = 1
    """Of each token, or of all."""
    alternatives: Sequence[Sequence[Alternative]] | None = None
    """Of each token, the most probable first; None: some that agree with its logprob and rank are made up."""
    other_logprobs: Sequence[float] | float = -0.5
    """Of each token, or of all; sent to requests that ask for them, as are entropies, given logprobs and masks."""
    entropies: Sequence[float] | float = 1.0
    """Of each token's distribution, or of all."""
    given_logprobs: Sequence[Mapping[int, float]] | Mapping[int, float] = field(default_factory=dict)
    """For each token, or for all, by the ids that requests name with `logprob_token_ids`; other ids have -10."""
    masks: Sequence[Sequence[int]] | None = None
    """For each token, the ids that sampling could have chosen; None: the token alone."""
    tokens_per_step: int = 1
    drafts: Sequence[Sequence[Alternative]] = ()
    """For each step, the draft model's proposals with their logprobs; sent to requests that ask for drafts."""
    status: RowStatus = RowStatus.FINISHED_STOP
    """How it ends: FINISHED_STOP or FINISHED_LENGTH; `fails_after` is for errors."""
    fails_after: int | None = None
    """After so many tokens a step fails because of this request, which ends with an error."""
    breaks_after: int | None = None
    """After so many tokens the engine breaks, which ends all its requests, and its worker."""
    error: str = "as the script says"


class ScriptedEngine:
    """Answers the first request with the first answer, and so on; or each with what a function of it returns.

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
        """The ids of the requests that were to be aborted, by a client or because they had failed."""
        self._answers = iter(answers)
        self._answer = answer or self._next
        self._rows: dict[int, _Row] = {}
        self._is_broken = False

    def _next(self, generate: Generate) -> Answer:
        found = next(self._answers, None)
        if found is None:
            raise ValueError(f"request_id: one that the script answers, got {generate.request_id}, which is one more")
        return found

    @property
    def has_work(self) -> bool:
        """Whether a request is open."""
        return bool(self._rows)

    def admit(self, generate: Generate) -> int:
        """Begin with a request."""
        self._rows[generate.request_id] = _Row(generate, self._answer(generate), self.vocabulary_size)
        self.admitted.append(generate)
        return max(1, len(generate.tokens.token_ids) or len(generate.text.text))

    def abort(self, key: int) -> None:
        """End a request at the next step."""
        self.aborted.append(key)
        if key in self._rows:
            self._rows[key].is_aborted = True

    def step(self) -> Sequence[StepArrays]:
        """Emit the next tokens of every request."""
        rows = list(self._rows.values())
        if broken := [row for row in rows if row.has_come_to(row.answer.breaks_after)]:
            raise EngineBrokenError(broken[0].answer.error)
        if failed := [row for row in rows if row.has_come_to(row.answer.fails_after)]:
            for row in failed:
                del self._rows[row.key]
            raise EngineStepError(failed[0].answer.error, [row.key for row in failed])
        steps = [_target(rows)]
        if any(row.draft for row in rows):
            steps[0].draft_follows = True
            steps.append(_draft(rows))
        for row in rows:
            if row.status is not RowStatus.ACTIVE:
                del self._rows[row.key]
            row.advance()
        return steps

    def close(self) -> None:
        """Forget every request."""
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
                raise ValueError(f"answer.{name}: {len(answer.tokens)}, one for each token, got {len(values)}")
        if answer.status not in {RowStatus.FINISHED_STOP, RowStatus.FINISHED_LENGTH}:
            raise ValueError(f"answer.status: FINISHED_STOP or FINISHED_LENGTH, got {RowStatus(answer.status).name}")
        if answer.tokens_per_step < 1:
            raise ValueError(f"answer.tokens_per_step: at least 1, got {answer.tokens_per_step}")
        for name in ("fails_after", "breaks_after"):
            place = getattr(answer, name)
            if place is not None and not 0 <= place < self._size:
                raise ValueError(f"answer.{name}: below {self._size}, the tokens that it gets, got {place}")
        fewest = min(map(len, answer.alternatives or ()), default=self.top_k)
        if fewest < self.top_k:
            raise ValueError(f"answer.alternatives: {self.top_k} for each token, as it was asked for, got {fewest}")

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

    def has_come_to(self, place: int | None) -> bool:
        """Tell whether it has so many tokens, and shall get no more."""
        return place is not None and self.position >= place and not self.is_aborted

    def advance(self) -> None:
        self.position += self.count
        self._step += 1

    def places(self) -> range:
        """Return the positions of the next step's tokens."""
        return range(self.position, self.position + self.count)

    def tokens(self) -> Iterator[tuple[int, float, int, Sequence[Alternative]]]:
        """Yield the id, logprob, rank and alternatives of each token of the next step."""
        answer = self.answer
        for place in self.places():
            token, logprob, rank = answer.tokens[place], _at(place, answer.logprobs), _at(place, answer.ranks)
            given = None if answer.alternatives is None else answer.alternatives[place]
            yield token, logprob, rank, (given or self._made_up(token, logprob, rank))[: self.top_k]

    def _made_up(self, token: int, logprob: float, rank: int) -> Sequence[Alternative]:
        ids = [(token + 1 + place) % self._vocabulary_size for place in range(self.top_k)]
        values = [logprob * (place + 1) / rank for place in range(min(rank, self.top_k))]
        values += [logprob - 0.25 * (place + 1) for place in range(self.top_k - rank)]
        if rank <= self.top_k:
            ids[rank - 1] = token
        return list(zip(ids, values, strict=True))


def _target(rows: Sequence[_Row]) -> StepArrays:
    tokens = [each for row in rows for each in row.tokens()]
    scored = [each for row in rows if row.is_scored for each in row.tokens()]
    return StepArrays(
        request_ids=[row.key for row in rows],
        positions=[row.position for row in rows],
        token_counts=[row.count for row in rows],
        token_ids=[token for token, *_ in tokens],
        statuses=[row.status for row in rows],
        logprobs=[logprob for _, logprob, *_ in scored],
        ranks=[rank for _, _, rank, _ in scored],
        alternative_token_ids=[token for *_, others in scored for token, _ in others],
        alternative_logprobs=[logprob for *_, others in scored for _, logprob in others],
        scored=[row.is_scored for row in rows],
        top_ks=[row.top_k for row in rows],
        draft_token_counts=[len(row.draft) for row in rows],
        method=SpeculativeMethod.MTP if any(row.answer.drafts for row in rows) else SpeculativeMethod.NONE,
        **(_extras(rows) if any(row.scoring.ListFields() for row in rows) else {}),
    )


def _extras(rows: Sequence[_Row]) -> dict[str, Any]:
    """Return the arrays of the extras that some requests asked for."""
    tokens = [(row.scoring, row.answer, place) for row in rows for place in row.places()]
    masks = [
        sorted(answer.masks[place] if answer.masks else answer.tokens[place : place + 1]) for _, answer, place in tokens
    ]
    return {
        "extras": [
            row.scoring.other_logprobs * Extra.OTHER_LOGPROB + row.scoring.entropies * Extra.ENTROPY for row in rows
        ],
        "other_logprobs": [_at(place, answer.other_logprobs) for _, answer, place in tokens],
        "entropies": [_at(place, answer.entropies) for _, answer, place in tokens],
        "given_counts": [len(row.scoring.token_ids) for row in rows],
        "given_token_ids": [each for row in rows for each in row.scoring.token_ids],
        "given_logprobs": [
            _at(place, answer.given_logprobs).get(each, _UNLIKELY)
            for scoring, answer, place in tokens
            for each in scoring.token_ids
        ],
        "mask_bounds": [row.scoring.mask_bound for row in rows],
        "mask_sizes": [len(mask) for mask in masks],
        "mask_token_ids": [
            each
            for (scoring, *_), mask in zip(tokens, masks, strict=True)
            if len(mask) <= scoring.mask_bound
            for each in mask
        ],
    }


def _at(place: int, values: Sequence[T] | T) -> T:
    """Return a token's value: its own of a sequence, else that of all."""
    return values[place] if isinstance(values, Sequence) else values


def _draft(rows: Sequence[_Row]) -> StepArrays:
    drafted = [each for row in rows for each in row.draft]
    scored = [each for row in rows if row.is_scored for each in row.draft]
    return StepArrays(
        kind=BatchKind.DRAFT,
        request_ids=[row.key for row in rows],
        positions=[row.position for row in rows],
        token_counts=[len(row.draft) for row in rows],
        token_ids=[token for token, _ in drafted],
        logprobs=[logprob for _, logprob in scored],
        ranks=[1] * len(scored),
        scored=[row.is_scored for row in rows],
        method=SpeculativeMethod.MTP,
    )
