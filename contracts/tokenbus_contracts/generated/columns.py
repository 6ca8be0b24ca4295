# Generated from proto/tokenbus/v1 by `make proto`. Do not edit: CI refuses a stale or edited copy.
"""The columns of a LogprobBatch: the arguments of its constructor, and its attributes."""

from typing import TypedDict

import numpy as np
import numpy.typing as npt


class ColumnArguments(TypedDict, total=False):
    """The columns as a caller gives them."""

    request_ids: npt.ArrayLike
    """Row: the id of its request. Unique among all open requests."""
    batch_indices: npt.ArrayLike
    """Row: its index in the step's original batch. Invalid at or above step_rows."""
    positions: npt.ArrayLike
    """Row: the position of its first token in the request's output; zero is the first token after the prompt. A row without tokens has the position of its next token."""
    statuses: npt.ArrayLike
    """Row: the state of its request after the step."""
    token_counts: npt.ArrayLike
    """Row: the number of its tokens in this message. Its status restricts it."""
    draft_token_counts: npt.ArrayLike
    """Row: the number of draft tokens that the target model verified in this step; zero may also mean not known. Must be zero in a draft batch."""
    proposal_counts: npt.ArrayLike
    """Row: the number of its elements in `proposal_token_ids`. Its status restricts it. Must be zero in a draft batch."""
    scorings: npt.ArrayLike
    """Row: the values that its tokens have besides their ids."""
    top_ks: npt.ArrayLike
    """Row: the number of alternatives of each token. Invalid above a known vocabulary_size; must be zero unless the scoring is FULL."""
    token_ids: npt.ArrayLike
    """Token: its id. Invalid at or above a known vocabulary_size."""
    logprobs: npt.ArrayLike
    """Scored token: its value; for logprobs in nats, so zero is certainty. A logprob above zero is invalid. An engine's minus infinity is written as -9999.0."""
    ranks: npt.ArrayLike
    """Scored token: its rank by value among all tokens, the largest first, from 1; for equal values any of their ranks. Invalid above a known vocabulary_size, or if the token's alternatives contradict it."""
    alternative_token_ids: npt.ArrayLike
    """Alternative: its id. The alternatives of a token are the top_k largest by value, the largest first, ties by lower id; any other order is invalid, and so is an id at or above a known vocabulary_size."""
    alternative_logprobs: npt.ArrayLike
    """Alternative: its value; for logprobs in nats. Invalid: a logprob above zero, and a value above the value of the token's previous alternative. The sampled token, if it is an alternative, must have the same value in `logprobs`."""
    proposal_token_ids: npt.ArrayLike
    """Proposal: the id of a draft token that is not verified yet, such as the one after a request's first token. Invalid at or above a known vocabulary_size."""
    stops: npt.ArrayLike
    """FINISHED_STOP row: the request's own stop that ended it. Zero: none of them (the model's own end token did) or not known. 1: a stop token, the row's last token. n >= 2: the stop text at index n - 2. An empty column: not known for any row."""
    extras: npt.ArrayLike
    """Row: further values of each of its tokens: 1 for `other_logprobs`, 2 for `entropies`, 3 for both. An empty column: zero for all rows. Must be zero if the scoring is NONE."""
    given_counts: npt.ArrayLike
    """Row: the number of token ids whose values its request asks for at each position. An empty column: zero for all rows. Must be zero unless the scoring is FULL."""
    mask_bounds: npt.ArrayLike
    """Row: the maximum size, in token ids, of the masks that it lists. A mask is the set of tokens that sampling could choose. Zero: the row has no masks. An empty column: zero for all rows. Must be zero unless the scoring is FULL."""
    other_logprobs: npt.ArrayLike
    """Token of a row whose extras are 1 or 3: its value in the other distribution. For a RAW value_kind that is the one after temperature, penalties and masks; otherwise the model's own. Invalid as in `logprobs`."""
    entropies: npt.ArrayLike
    """Token of a row whose extras are 2 or 3: the entropy of the distribution that value_kind names, in nats."""
    given_token_ids: npt.ArrayLike
    """Given token: its id, in the order of the request. Invalid at or above a known vocabulary_size."""
    given_logprobs: npt.ArrayLike
    """Pair of a token and a given token: the value of the given token at that position. Invalid as in `logprobs`."""
    mask_sizes: npt.ArrayLike
    """Token of a row with a mask_bound: the number of tokens that sampling could choose there, after all masks. Invalid above a known vocabulary_size."""
    mask_token_ids: npt.ArrayLike
    """Token id of a mask, for the positions whose mask is not larger than the row's mask_bound; the ids of one position ascend. Invalid at or above a known vocabulary_size."""


class ColumnArrays:
    """The columns as arrays."""

    __slots__ = ('request_ids', 'batch_indices', 'positions', 'statuses', 'token_counts', 'draft_token_counts', 'proposal_counts', 'scorings', 'top_ks', 'token_ids', 'logprobs', 'ranks', 'alternative_token_ids', 'alternative_logprobs', 'proposal_token_ids', 'stops', 'extras', 'given_counts', 'mask_bounds', 'other_logprobs', 'entropies', 'given_token_ids', 'given_logprobs', 'mask_sizes', 'mask_token_ids')

    request_ids: npt.NDArray[np.uint64]
    """Row: the id of its request. Unique among all open requests."""
    batch_indices: npt.NDArray[np.uint32]
    """Row: its index in the step's original batch. Invalid at or above step_rows."""
    positions: npt.NDArray[np.uint32]
    """Row: the position of its first token in the request's output; zero is the first token after the prompt. A row without tokens has the position of its next token."""
    statuses: npt.NDArray[np.uint8]
    """Row: the state of its request after the step."""
    token_counts: npt.NDArray[np.uint8]
    """Row: the number of its tokens in this message. Its status restricts it."""
    draft_token_counts: npt.NDArray[np.uint8]
    """Row: the number of draft tokens that the target model verified in this step; zero may also mean not known. Must be zero in a draft batch."""
    proposal_counts: npt.NDArray[np.uint8]
    """Row: the number of its elements in `proposal_token_ids`. Its status restricts it. Must be zero in a draft batch."""
    scorings: npt.NDArray[np.uint8]
    """Row: the values that its tokens have besides their ids."""
    top_ks: npt.NDArray[np.uint8]
    """Row: the number of alternatives of each token. Invalid above a known vocabulary_size; must be zero unless the scoring is FULL."""
    token_ids: npt.NDArray[np.uint32]
    """Token: its id. Invalid at or above a known vocabulary_size."""
    logprobs: npt.NDArray[np.float32]
    """Scored token: its value; for logprobs in nats, so zero is certainty. A logprob above zero is invalid. An engine's minus infinity is written as -9999.0."""
    ranks: npt.NDArray[np.uint32]
    """Scored token: its rank by value among all tokens, the largest first, from 1; for equal values any of their ranks. Invalid above a known vocabulary_size, or if the token's alternatives contradict it."""
    alternative_token_ids: npt.NDArray[np.uint32]
    """Alternative: its id. The alternatives of a token are the top_k largest by value, the largest first, ties by lower id; any other order is invalid, and so is an id at or above a known vocabulary_size."""
    alternative_logprobs: npt.NDArray[np.float32]
    """Alternative: its value; for logprobs in nats. Invalid: a logprob above zero, and a value above the value of the token's previous alternative. The sampled token, if it is an alternative, must have the same value in `logprobs`."""
    proposal_token_ids: npt.NDArray[np.uint32]
    """Proposal: the id of a draft token that is not verified yet, such as the one after a request's first token. Invalid at or above a known vocabulary_size."""
    stops: npt.NDArray[np.uint8]
    """FINISHED_STOP row: the request's own stop that ended it. Zero: none of them (the model's own end token did) or not known. 1: a stop token, the row's last token. n >= 2: the stop text at index n - 2. An empty column: not known for any row."""
    extras: npt.NDArray[np.uint8]
    """Row: further values of each of its tokens: 1 for `other_logprobs`, 2 for `entropies`, 3 for both. An empty column: zero for all rows. Must be zero if the scoring is NONE."""
    given_counts: npt.NDArray[np.uint32]
    """Row: the number of token ids whose values its request asks for at each position. An empty column: zero for all rows. Must be zero unless the scoring is FULL."""
    mask_bounds: npt.NDArray[np.uint32]
    """Row: the maximum size, in token ids, of the masks that it lists. A mask is the set of tokens that sampling could choose. Zero: the row has no masks. An empty column: zero for all rows. Must be zero unless the scoring is FULL."""
    other_logprobs: npt.NDArray[np.float32]
    """Token of a row whose extras are 1 or 3: its value in the other distribution. For a RAW value_kind that is the one after temperature, penalties and masks; otherwise the model's own. Invalid as in `logprobs`."""
    entropies: npt.NDArray[np.float32]
    """Token of a row whose extras are 2 or 3: the entropy of the distribution that value_kind names, in nats."""
    given_token_ids: npt.NDArray[np.uint32]
    """Given token: its id, in the order of the request. Invalid at or above a known vocabulary_size."""
    given_logprobs: npt.NDArray[np.float32]
    """Pair of a token and a given token: the value of the given token at that position. Invalid as in `logprobs`."""
    mask_sizes: npt.NDArray[np.uint32]
    """Token of a row with a mask_bound: the number of tokens that sampling could choose there, after all masks. Invalid above a known vocabulary_size."""
    mask_token_ids: npt.NDArray[np.uint32]
    """Token id of a mask, for the positions whose mask is not larger than the row's mask_bound; the ids of one position ascend. Invalid at or above a known vocabulary_size."""
