"""SyntheticEngine: no model at all, but steps like an engine's, whose every token can be computed again."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenbus_contracts import (
    BatchHeader,
    BatchKind,
    LogprobBatch,
    RowStatus,
    Scoring,
    SpeculativeMethod,
    StepPhase,
    ValueKind,
)
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_services.worker import truth

_UNLIMITED = 2**31 - 1


@dataclass(slots=True)
class _Running:
    """A request in the engine."""

    key: int
    position: int
    end: int
    top_k: int
    is_scored: bool
    is_aborted: bool = False


class SyntheticEngine:
    """Emits a few tokens a step for each request, in an order of rows that is not the batch's."""

    def __init__(self, *, tokens_per_step: int = 3, drafts: bool = False, parts: int = 1, max_rows: int = 512) -> None:
        """Say how many tokens a row has, whether steps have drafts, and in how many parts they come.

        More than `max_rows` requests wait for each other.
        """
        self._tokens_per_step = tokens_per_step
        self._drafts = drafts
        self._parts = parts
        self._max_rows = max_rows
        self._requests: dict[int, _Running] = {}
        self._step = 0

    @property
    def vocabulary_size(self) -> int:
        """How many token ids it has."""
        return truth.VOCABULARY_SIZE

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests)

    def admit(self, generate: Generate) -> int:
        """Take a request, and return how long its prompt is."""
        sampling = generate.sampling
        end = sampling.max_tokens if sampling.HasField("max_tokens") else _UNLIMITED
        scored = generate.HasField("top_logprobs")
        key = generate.request_key
        self._requests[key] = _Running(key, 0, end, generate.top_logprobs if scored else 0, scored)
        return len(generate.tokens.token_ids) or len(generate.text.text)

    def abort(self, key: int) -> None:
        """End a request at the next step."""
        request = self._requests.get(key)
        if request is not None:
            request.is_aborted = True

    def step(self) -> Sequence[LogprobBatch]:
        """Compute a step: the target's parts, then the draft's."""
        self._step += 1
        rows = list(self._requests.values())[: self._max_rows]
        emitted = self._batch(rows, BatchKind.TARGET)
        drafted = self._batch(rows, BatchKind.DRAFT) if self._drafts else None
        for request in rows:
            request.position = min(request.position + self._tokens_per_step, request.end)
            if request.is_aborted or request.position >= request.end:
                del self._requests[request.key]
        batches = self._in_parts(emitted)
        return batches if drafted is None else batches + self._in_parts(drafted)

    def _batch(self, rows: list[_Running], kind: BatchKind) -> LogprobBatch:
        size = len(rows)
        # Engines sort rows by what they compute for them; here by the step's number.
        order = np.random.default_rng(self._step).permutation(size)
        mine = [rows[place] for place in order]
        keys = np.array([row.key for row in mine], np.uint64)
        positions = np.array([row.position for row in mine], np.uint32)
        counts = np.array([self._count(row) for row in mine], np.uint8)
        scored = np.array([row.is_scored for row in mine], np.bool_)
        top_ks = np.array([row.top_k for row in mine], np.uint8)
        starts = np.cumsum(counts, dtype=np.intp) - counts
        places = np.arange(counts.sum(dtype=np.intp)) - np.repeat(starts, counts)
        numbers = truth.draws(np.repeat(keys, counts), np.repeat(positions, counts) + places)
        tokens = truth.sampled(numbers)
        token_scored = np.repeat(scored, counts)
        other_ids, other_logprobs = truth.alternatives(numbers, np.repeat(top_ks, counts))
        is_target = kind is BatchKind.TARGET
        return LogprobBatch(
            BatchHeader(
                "",
                epoch=1,
                sequence=1,
                step=self._step,
                step_rows=size,
                kind=kind,
                phase=StepPhase.MIXED,
                method=SpeculativeMethod.MTP,
                value_kind=ValueKind.RAW_LOGPROBS,
                vocabulary_size=truth.VOCABULARY_SIZE,
                draft_follows=is_target and self._drafts,
            ),
            request_keys=keys,
            batch_indices=order.astype(np.uint32),
            positions=positions,
            statuses=np.array([self._status(row, kind) for row in mine], np.uint8),
            token_counts=counts,
            draft_token_counts=np.maximum(counts, 1) - 1 if is_target else np.zeros(size, np.uint8),
            proposal_counts=np.zeros(size, np.uint8),
            scorings=np.where(scored, np.uint8(Scoring.FULL), np.uint8(Scoring.NONE)),
            top_ks=top_ks,
            token_ids=tokens.ids,
            logprobs=tokens.logprobs[token_scored],
            ranks=tokens.ranks[token_scored],
            alternative_token_ids=other_ids,
            alternative_logprobs=other_logprobs,
        )

    def _count(self, row: _Running) -> int:
        return 0 if row.is_aborted else min(self._tokens_per_step, row.end - row.position)

    def _status(self, row: _Running, kind: BatchKind) -> RowStatus:
        if kind is BatchKind.DRAFT:  # a row for each of the target's, as a row's place must be the same in both
            return RowStatus.IDLE if row.is_aborted else RowStatus.ACTIVE
        if row.is_aborted:
            return RowStatus.ABORTED
        return RowStatus.FINISHED_LENGTH if row.position + self._tokens_per_step >= row.end else RowStatus.ACTIVE

    def _in_parts(self, batch: LogprobBatch) -> list[LogprobBatch]:
        """Return the batch, or its rows in as many messages as wanted."""
        parts = min(self._parts, batch.row_count)
        if parts <= 1:
            return [batch]
        cuts = np.array_split(np.arange(batch.row_count), parts)
        return [
            LogprobBatch.of_views(batch.header._replace(part_index=place, part_count=parts), batch.select(cut).columns)
            for place, cut in enumerate(cuts)
        ]
