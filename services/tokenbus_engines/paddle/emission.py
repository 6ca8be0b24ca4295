"""Emission: what became of a step's rows, as the arrays that the worker publishes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import BatchKind, RowStatus, SpeculativeMethod, StepPhase
from tokenbus_engines.paddle.requests import Request
from tokenbus_engines.paddle.scores import scored
from tokenbus_engines.paddle.speculation import Logits
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """What a step's two batches have in common."""

    places: Sequence[int]
    """Of rows: their places in the original batch."""
    phase: StepPhase
    method: SpeculativeMethod


def step_arrays(outcomes: Sequence[Outcome], info: StepInfo, states: Mapping[int, bytes]) -> list[StepArrays]:
    """Return the target's batch, and the drafts' where a row wants what was verified for it."""
    is_drafted = any(_told(outcome) for outcome in outcomes)
    target = StepArrays(
        **_shared(outcomes, info),
        **_tokens([outcome.tokens for outcome in outcomes]),
        **_values(outcomes, [(outcome.tokens, outcome.logits) for outcome in outcomes]),
        statuses=np.array([outcome.status for outcome in outcomes], np.uint8),
        kept_counts=np.array([outcome.kept for outcome in outcomes], np.uint8),
        draft_token_counts=np.array([len(outcome.drafts) for outcome in outcomes], np.uint8),
        proposal_token_ids=_flat([outcome.proposals for outcome in outcomes]),
        proposal_counts=np.array([len(outcome.proposals) for outcome in outcomes], np.uint8),
        kind=BatchKind.TARGET,
        draft_follows=is_drafted,
        states=states,
    )
    if not is_drafted:
        return [target]
    given = [(_told(outcome), outcome.draft_logits) for outcome in outcomes]
    draft = StepArrays(
        **_shared(outcomes, info),
        **_tokens([tokens for tokens, _ in given]),
        **_values(outcomes, given),
        kind=BatchKind.DRAFT,
    )
    return [target, draft]


def _told(outcome: Outcome) -> Sequence[int]:
    return outcome.drafts if outcome.request.wants_drafts else ()


def _shared(outcomes: Sequence[Outcome], info: StepInfo) -> dict[str, Any]:
    return {
        "request_keys": np.array([outcome.request.key for outcome in outcomes], np.uint64),
        "positions": np.array([outcome.position for outcome in outcomes], np.uint32),
        "scored": np.array([outcome.request.is_scored for outcome in outcomes], np.bool_),
        "top_ks": np.array([outcome.request.top_logprobs for outcome in outcomes], np.uint8),
        "index_to_batch_id": np.array(info.places, np.uint32),
        "phase": info.phase,
        "method": info.method,
    }


def _tokens(rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    return {"token_ids": _flat(rows), "token_counts": np.array([len(row) for row in rows], np.uint8)}


def _flat(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.uint32]:
    return np.array([token for row in rows for token in row], np.uint32)


def _values(outcomes: Sequence[Outcome], given: Sequence[tuple[Sequence[int], Logits]]) -> dict[str, Any]:
    """Return the scores of the scored rows' tokens, with as many alternatives as the most that one wants."""
    mine = [
        (tokens, logits[: len(tokens)])
        for outcome, (tokens, logits) in zip(outcomes, given, strict=True)
        if outcome.request.is_scored and len(tokens)
    ]
    most = max(outcome.request.top_logprobs for outcome in outcomes)
    if not mine:
        return scored(np.zeros((0, most), np.float32), np.zeros(0, np.int64), most)._asdict()
    ids = np.concatenate([np.asarray(tokens, np.int64) for tokens, _ in mine])
    return scored(np.concatenate([logits for _, logits in mine]), ids, most)._asdict()
