"""StepArrays: what an engine's step emitted, as arrays of any framework."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenbus_contracts import BatchKind, SpeculativeMethod, StepPhase, ValueKind

Array = Any
"""An array of numpy, paddle, torch, cupy or whatever else can become a numpy array, on any device; or a sequence."""


@dataclass(slots=True, kw_only=True)
class StepArrays:
    """One batch of a step: the target's, or the draft's. StepAssembler makes messages of it.

    Arrays "of tokens" are either flat, the tokens of all rows one after the other as `token_counts` says, or have
    one line for each row with its tokens from the left; what lies behind them is not looked at.

    Example:
        import numpy as np

        step = tokenbus.StepArrays(
            request_keys=np.array([7, 9], np.uint64), positions=[0, 0], token_counts=[2, 1], token_ids=[4, 2, 1]
        )
    """

    request_keys: Array
    """Of rows: which request each is."""
    positions: Array
    """Of rows: the place of the first token in the request's output; where there is none, of the next one."""
    token_counts: Array
    """Of rows: how many tokens each was given in this step."""
    token_ids: Array
    """Of tokens."""
    statuses: Array | None = None
    """Of rows: RowStatus; if absent, ACTIVE with tokens and IDLE without."""
    kept_counts: Array | None = None
    """Of rows: how many tokens are left of it, where a stop was met inside an accepted block; if absent, all are.

    Ids, logprobs, ranks and alternatives behind them are left out together.
    """
    logprobs: Array | None = None
    """Of tokens, or flat of the tokens of scored rows alone; if absent, no row is scored."""
    ranks: Array | None = None
    """As logprobs."""
    alternative_token_ids: Array | None = None
    """As logprobs, with one line more for each token, the most probable first; or flat, as `top_ks` says."""
    alternative_logprobs: Array | None = None
    """As alternative_token_ids."""
    scored: Array | None = None
    """Of rows: whether its request wants logprobs; if absent, all do where there are logprobs."""
    top_ks: Array | None = None
    """Of rows: how many alternatives its request wants; if absent, as many as there are in a line."""
    draft_token_counts: Array | None = None
    """Of rows: how many draft tokens were verified in this step; if absent, none."""
    proposal_token_ids: Array | None = None
    """Of proposals: draft tokens that were not verified yet, flat or in lines, as arrays of tokens are."""
    proposal_counts: Array | None = None
    """Of rows: how many of them are its own."""
    index_to_batch_id: Array | None = None
    """Of rows: its place in the original batch; if absent, rows are in that order."""
    kind: BatchKind = BatchKind.TARGET
    phase: StepPhase = StepPhase.MIXED
    method: SpeculativeMethod = SpeculativeMethod.NONE
    value_kind: ValueKind = ValueKind.RAW_LOGPROBS
    """What the numbers are, where there are any."""
    step: int = 0
    """The engine's own number of the step; 0: the one after the last target's, and for a draft, that of the last.

    An engine that launches a step while the one before is computed has it from `Launches`.
    """
    draft_follows: bool = False
    """Whether the draft of this step comes after it; it may come some steps later."""
    weight_version: int = 0
    """Which weights computed the step; 0: not counted."""
    parts: int = 1
    """In how many messages it goes at least; as many more as its size needs."""
    states: Mapping[int, bytes] = field(default_factory=dict)
    """By key, what a decode worker needs to go on with each request that this step hands off."""
