"""StepArrays: the results of an engine's step, as arrays of any framework."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tokenbus_contracts import BatchKind, PromptScores, SpeculativeMethod, StepPhase, ValueKind

Array = Any
"""A sequence, or an array on any device of numpy, paddle, torch, cupy or another type that numpy can convert."""


@dataclass(slots=True, kw_only=True)
class StepArrays:
    """The target or the draft batch of a step, as arrays. StepAssembler makes messages of these arrays.

    An array with an element for each token is either flat or padded. A flat array concatenates the rows' tokens. A
    padded array has one line for each row, with the row's tokens first.

    Example:
        import numpy as np

        step = tokenbus.StepArrays(
            request_ids=np.array([7, 9], np.uint64), positions=[0, 0], token_counts=[2, 1], token_ids=[4, 2, 1]
        )
    """

    request_ids: Array
    """Request id of each row."""
    positions: Array
    """Position of each row's first token in the request's output, or of the next token in a row without tokens."""
    token_counts: Array
    """Number of tokens of each row in this step."""
    token_ids: Array
    """Id of each token."""
    statuses: Array | None = None
    """RowStatus of each row, by default ACTIVE for a row with tokens and IDLE for a row without tokens."""
    stops: Array | None = None
    """Stop that ended each row with the status FINISHED_STOP, if known.

    0 is none of the request's stops, 1 is a stop token, and other values are an index in `sampling.stop` plus two.
    """
    kept_counts: Array | None = None
    """Number of tokens that each row keeps if a stop cuts the row, by default all tokens.

    Ids, logprobs, ranks and alternatives of the other tokens are cut off together.
    """
    logprobs: Array | None = None
    """Logprobs of all tokens, or a flat array for only the scored rows, or None without scored rows."""
    ranks: Array | None = None
    """Rank of each token, laid out as `logprobs`."""
    alternative_token_ids: Array | None = None
    """Alternatives of each token, most probable first: either one more dimension, or flat with counts in `top_ks`."""
    alternative_logprobs: Array | None = None
    """Logprobs of the alternatives, laid out as `alternative_token_ids`."""
    scored: Array | None = None
    """Whether each row's request wants logprobs, by default true if there are logprobs."""
    top_ks: Array | None = None
    """Number of alternatives that each row's request wants, by default all given alternatives."""
    extras: Array | None = None
    """Sum of the `Extra` values (`other_logprobs`, `entropies`) that each row's request wants."""
    other_logprobs: Array | None = None
    """Logprobs of all tokens in the other distribution, or a flat array for only the rows that want them."""
    entropies: Array | None = None
    """Entropy of the distribution of each token's logprobs, laid out as `other_logprobs`."""
    given_counts: Array | None = None
    """Number of token ids whose logprobs each row's request wants at each position."""
    given_token_ids: Array | None = None
    """Flat array of each row's requested token ids."""
    given_logprobs: Array | None = None
    """Flat array of each token's logprobs for the `given_token_ids`."""
    mask_bounds: Array | None = None
    """Size of the largest mask whose ids each row's request wants, or 0 for no masks."""
    mask_sizes: Array | None = None
    """Number of tokens that sampling could choose, laid out as `other_logprobs`, for rows with a mask bound."""
    mask_token_ids: Array | None = None
    """Flat array of the ascending ids of each mask that does not exceed the row's bound."""
    draft_token_counts: Array | None = None
    """Number of draft tokens of each row that this step verified, by default 0."""
    proposal_token_ids: Array | None = None
    """Draft tokens that are not verified yet, flat or padded."""
    proposal_counts: Array | None = None
    """Number of each row's unverified draft tokens."""
    index_to_batch_id: Array | None = None
    """Index of each row in the original batch, by default the row's own index."""
    kind: BatchKind = BatchKind.TARGET
    phase: StepPhase = StepPhase.MIXED
    method: SpeculativeMethod = SpeculativeMethod.NONE
    value_kind: ValueKind = ValueKind.RAW_LOGPROBS
    """Kind of the values in `logprobs` and `alternative_logprobs`."""
    step: int = 0
    """The engine's number of the step, or 0 for an automatic number.

    The automatic number is the next number for a target batch, and the last target's number for a draft batch.
    """
    draft_follows: bool = False
    """Whether a draft batch of this step follows, perhaps some steps later."""
    weight_version: int = 0
    """Version of the weights that computed the step, or 0 if unknown."""
    parts: int = 1
    """Minimum number of messages for this batch; its size may require more."""
    transfer_states: Mapping[int, bytes] = field(default_factory=dict)
    """Transfer states by the ids of HANDED_OFF requests, at most 48 KiB each, published before the batch.

    With a transfer state, a decode worker need not compute the tokens again.
    """
    prompt_scores: Sequence[PromptScores] = ()
    """Prompt scores for requests whose first rows are in this batch, published before the batch."""
    cached_prompts: Sequence[tuple[int, int, int]] = ()
    """Request id, prompt length and number of cached tokens of the requests whose first tokens are in this batch.

    Requests without cached tokens may be left out. The numbers are published before the batch.
    """


ARRAYS = tuple(each.name for each in fields(StepArrays) if each.type in (Array, Array | None))
"""Names of all fields of StepArrays that are arrays."""
