"""Emission: what became of a step's rows, as the arrays that the worker publishes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import BatchKind, RowStatus, SpeculativeMethod, StepPhase
from tokenbus_engines.emission import batch_order
from tokenbus_engines.paddle.requests import Request
from tokenbus_engines.paddle.speculation import Logits
from tokenbus_gpu_ops import token_logprobs
from tokenbus_services.worker.step import StepArrays


def _no_logits() -> Logits:
    return np.zeros((0, 0), np.float32)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a step made of one request."""

    request: Request
    position: int
    """The place of its first token in its output."""
    status: RowStatus
    tokens: Sequence[int] = ()
    kept: int = 0
    """How many of them are left, where one ended the request."""
    logits: Logits = field(default_factory=_no_logits)
    """The target's, a line for each token."""
    drafts: Sequence[int] = ()
    """What was verified."""
    draft_logits: Logits = field(default_factory=_no_logits)
    proposals: Sequence[int] = ()
    """What was proposed to follow its first token."""


def step_arrays(
    outcomes: Sequence[Outcome], phase: StepPhase, method: SpeculativeMethod, states: Mapping[int, bytes]
) -> list[StepArrays]:
    """Return the target's batch, and the drafts' where a row wants what was verified for it."""
    requests = [outcome.request for outcome in outcomes]
    shown = [outcome.drafts if outcome.request.wants_drafts else () for outcome in outcomes]
    shared: dict[str, Any] = {
        "request_keys": np.array([request.key for request in requests], np.uint64),
        "positions": np.array([outcome.position for outcome in outcomes], np.uint32),
        "scored": np.array([request.is_scored for request in requests], np.bool_),
        "top_ks": np.array([request.top_logprobs for request in requests], np.uint8),
        "index_to_batch_id": batch_order(np.array([request.serial for request in requests], np.int64)),
        "phase": phase,
        "method": method,
    }
    target = StepArrays(
        **shared,
        **_tokens(requests, [outcome.tokens for outcome in outcomes], [outcome.logits for outcome in outcomes]),
        statuses=np.array([outcome.status for outcome in outcomes], np.uint8),
        kept_counts=np.array([outcome.kept for outcome in outcomes], np.uint8),
        draft_token_counts=np.array([len(outcome.drafts) for outcome in outcomes], np.uint8),
        proposal_token_ids=_flat([outcome.proposals for outcome in outcomes]),
        proposal_counts=np.array([len(outcome.proposals) for outcome in outcomes], np.uint8),
        draft_follows=any(shown),
        states=states,
    )
    if not any(shown):
        return [target]
    logits = [outcome.draft_logits for outcome in outcomes]
    return [target, StepArrays(**shared, **_tokens(requests, shown, logits), kind=BatchKind.DRAFT)]


def _tokens(requests: Sequence[Request], rows: Sequence[Sequence[int]], logits: Sequence[Logits]) -> dict[str, Any]:
    """Return each row's tokens, and the scores of those of scored rows."""
    scored = [
        place for place, (request, row) in enumerate(zip(requests, rows, strict=True)) if request.is_scored and row
    ]
    most = max(request.top_logprobs for request in requests)
    lines = [logits[place][: len(rows[place])] for place in scored] or [np.zeros((0, most), np.float32)]
    ids = _flat([rows[place] for place in scored]).astype(np.int64)
    counts = np.array([len(row) for row in rows], np.uint8)
    return {"token_ids": _flat(rows), "token_counts": counts} | scores(np.concatenate(lines), ids, most)


def _flat(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.uint32]:
    return np.array([token for row in rows for token in row], np.uint32)


def scores(logits: Logits, tokens: npt.NDArray[np.integer], top_k: int) -> dict[str, npt.NDArray[Any]]:
    """Return the logprob, rank and first alternatives of one token for each line of logits, which are all numbers.

    Alternatives are [tokens, top_k], the most probable first, ties by the lower id.
    """
    found = token_logprobs(logits, tokens, top_k)
    lines = (len(tokens), top_k)
    return {
        "logprobs": found.logprobs,
        "ranks": found.ranks,
        "alternative_token_ids": found.alternative_token_ids.reshape(lines),
        "alternative_logprobs": found.alternative_logprobs.reshape(lines),
    }
