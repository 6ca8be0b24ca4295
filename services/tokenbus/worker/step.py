"""StepArrays: the results of an engine's step, as arrays of any framework."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tokenbus_contracts import BatchKind, PromptScores, SpeculativeMethod, StepPhase, ValueKind

Array = Any
"""An array of numpy, paddle, torch, cupy or any other type that numpy can convert, on any device; or a sequence."""


@dataclass(slots=True, kw_only=True)
class StepArrays:
    """One batch of a step, of the target or the draft model, from which StepAssembler makes messages.

    An array "of tokens" is either flat, with the rows' lengths in `token_counts`, or padded: one line for each row,
    with its tokens first.

    Example:
        import numpy as np

        step = tokenbus.StepArrays(
            request_ids=np.array([7, 9], np.uint64), positions=[0, 0], token_counts=[2, 1], token_ids=[4, 2, 1]
        )
    """

    request_ids: Array
    """Of rows: the request's id."""
    positions: Array
    """Of rows: the position of the row's first token in the request's output; without tokens, of the next token."""
    token_counts: Array
    """Of rows: the number of tokens in this step."""
    token_ids: Array
    """Of tokens."""
    statuses: Array | None = None
    """Of rows: RowStatus; if absent, ACTIVE with tokens and IDLE without."""
    stops: Array | None = None
    """Of rows: which of the request's stops ended a row with FINISHED_STOP; if absent, unknown.

    0: none of the request's stops; 1: a stop token, the row's last; from 2 on, the index in `sampling.stop` plus two.
    """
    kept_counts: Array | None = None
    """Of rows: the number of kept tokens, if a stop lies inside an accepted block; if absent, all are kept.

    Ids, logprobs, ranks and alternatives of the others are cut off together.
    """
    logprobs: Array | None = None
    """Of tokens, or flat and only of the tokens of scored rows; if absent, no row is scored."""
    ranks: Array | None = None
    """As logprobs."""
    alternative_token_ids: Array | None = None
    """As logprobs, with one more dimension, the most probable first; or flat, with the counts in `top_ks`."""
    alternative_logprobs: Array | None = None
    """As alternative_token_ids."""
    scored: Array | None = None
    """Of rows: whether the request wants logprobs; if absent, all requests do if there are logprobs."""
    top_ks: Array | None = None
    """Of rows: the number of alternatives that the request wants; if absent, all given alternatives."""
    extras: Array | None = None
    """Of rows: a sum of `Extra` values, if the request wants `other_logprobs` or `entropies`."""
    other_logprobs: Array | None = None
    """Of tokens, or flat and only of the tokens of rows that want it: the token's value in the other distribution."""
    entropies: Array | None = None
    """Laid out as other_logprobs, for rows that want it: the entropy of the distribution of the logprobs."""
    given_counts: Array | None = None
    """Of rows: the number of token ids whose values the request wants at each position."""
    given_token_ids: Array | None = None
    """Flat: the token ids of each row, row after row."""
    given_logprobs: Array | None = None
    """Flat: for each token, the values of its row's `given_token_ids`."""
    mask_bounds: Array | None = None
    """Of rows: the size of the largest mask whose ids the request wants; 0: none."""
    mask_sizes: Array | None = None
    """Laid out as other_logprobs, for rows with a bound: the number of tokens that sampling could have chosen."""
    mask_token_ids: Array | None = None
    """Flat: for each token whose mask is within its row's bound, the ids of the mask, in order."""
    draft_token_counts: Array | None = None
    """Of rows: the number of draft tokens that were verified in this step; if absent, none."""
    proposal_token_ids: Array | None = None
    """Of proposals, flat or padded: draft tokens that are not verified yet."""
    proposal_counts: Array | None = None
    """Of rows: the number of proposals."""
    index_to_batch_id: Array | None = None
    """Of rows: the index in the original batch; if absent, the rows are in that order."""
    kind: BatchKind = BatchKind.TARGET
    phase: StepPhase = StepPhase.MIXED
    method: SpeculativeMethod = SpeculativeMethod.NONE
    value_kind: ValueKind = ValueKind.RAW_LOGPROBS
    """The kind of values in `logprobs` and `alternative_logprobs`."""
    step: int = 0
    """The engine's number of the step.

    0: the number after the last target batch; for a draft batch, the number of that batch.
    """
    draft_follows: bool = False
    """Whether a draft batch of this step follows, maybe some steps later."""
    weight_version: int = 0
    """The version of the weights that computed the step; 0: unknown."""
    parts: int = 1
    """The minimum number of messages for this batch; its size may need more."""
    transfer_states: Mapping[int, bytes] = field(default_factory=dict)
    """By the ids of HANDED_OFF requests, at most 48 KiB each, published before the batch.

    With it, a decode worker need not compute the tokens again.
    """
    prompt_scores: Sequence[PromptScores] = ()
    """Scores for requests that asked for them, published before the batch with the request's first row."""
    cached_prompts: Sequence[tuple[int, int, int]] = ()
    """For requests whose first tokens are in this batch: the id, the prompt's length, and the number of cached tokens.

    Requests without cached tokens may be left out. They are published before the batch.
    """


ARRAYS = tuple(each.name for each in fields(StepArrays) if each.type in (Array, Array | None))
"""The fields that are arrays."""
