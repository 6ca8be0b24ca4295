# Generated from proto/tokenbus/v1 by `make proto`. Do not edit: CI refuses a stale or edited copy.
"""The columns of a LogprobBatch: the arguments of its constructor, and its attributes."""

from typing import TypedDict

import numpy as np
import numpy.typing as npt


class ColumnArguments(TypedDict, total=False):
    """The columns as a caller gives them."""

    request_ids: npt.ArrayLike
    """For each row, the id of its request. The id is unique among all open requests."""
    batch_indices: npt.ArrayLike
    """For each row, its index in the step's original batch. An index at or above step_rows is invalid."""
    positions: npt.ArrayLike
    """For each row, the position of its first token in the request's output. Position zero is the first token after the prompt. A row without tokens has the position of the request's next token."""
    statuses: npt.ArrayLike
    """For each row, the state of its request after the step."""
    token_counts: npt.ArrayLike
    """For each row, the number of its tokens in this message. The row's status restricts the number."""
    draft_token_counts: npt.ArrayLike
    """For each row, the number of draft tokens that the target model verified in this step. Zero may also mean that the number is unknown. The number must be zero in a draft batch."""
    proposal_counts: npt.ArrayLike
    """For each row, the number of its elements in `proposal_token_ids`. The row's status restricts the number. The number must be zero in a draft batch."""
    scorings: npt.ArrayLike
    """For each row, the values that its tokens have in addition to their ids."""
    top_ks: npt.ArrayLike
    """For each row, the number of alternatives of each token. A number above a known vocabulary_size is invalid. The number must be zero unless the row's scoring is FULL."""
    token_ids: npt.ArrayLike
    """For each token, its id. An id at or above a known vocabulary_size is invalid."""
    logprobs: npt.ArrayLike
    """For each scored token, its logprob in nats or its logit, as value_kind says. A logprob above zero is invalid. The writer replaces an engine's minus infinity by -9999.0."""
    ranks: npt.ArrayLike
    """For each scored token, its rank by value among all tokens. The largest value has rank 1. If several tokens have the same value, any of their ranks is valid. A rank above a known vocabulary_size is invalid, and so is a rank that the token's alternatives contradict."""
    alternative_token_ids: npt.ArrayLike
    """For each alternative, its id. A token's alternatives are the top_k tokens with the largest values. The largest value comes first, and equal values are ordered by ascending id. Alternatives in another order are invalid. An id at or above a known vocabulary_size is invalid."""
    alternative_logprobs: npt.ArrayLike
    """For each alternative, its logprob in nats or its logit, as value_kind says. A logprob above zero is invalid. A value above the value of the token's previous alternative is invalid. A sampled token that is an alternative must have the same value in `logprobs`."""
    proposal_token_ids: npt.ArrayLike
    """For each proposal, the id of a draft token that is not verified yet. For example, a prefill worker computes a request's first token and proposes the second token. An id at or above a known vocabulary_size is invalid."""
    stops: npt.ArrayLike
    """For each FINISHED_STOP row, which of the request's own stop tokens or stop texts ended the request. Value 1 means a stop token, which is the row's last token. Value n >= 2 means the stop text at index n - 2. Value zero means the model's own end token or an unknown cause. If the column is empty, the cause is unknown for every row."""
    extras: npt.ArrayLike
    """For each row, the extra values of each token: 1 for `other_logprobs`, 2 for `entropies`, 3 for both. An empty column means zero for all rows. The value must be zero if the row's scoring is NONE."""
    given_counts: npt.ArrayLike
    """For each row, the number of token ids whose values the request wants at each position. An empty column means zero for all rows. The number must be zero unless the row's scoring is FULL."""
    mask_bounds: npt.ArrayLike
    """For each row, the maximum mask size. The message lists the token ids of all masks up to this size. A mask is the set of tokens that sampling could choose at one position. If zero, the row has no masks. An empty column means zero for all rows. The size must be zero unless the row's scoring is FULL."""
    other_logprobs: npt.ArrayLike
    """For each token of a row whose extras are 1 or 3, the token's value in the other distribution. If value_kind is RAW, the other distribution is the distribution after temperature, penalties and masks. If value_kind is PROCESSED, the other distribution is the model's own. Values that are invalid in `logprobs` are also invalid here."""
    entropies: npt.ArrayLike
    """For each token of a row whose extras are 2 or 3, the entropy in nats of the distribution that value_kind names."""
    given_token_ids: npt.ArrayLike
    """For each given token, its id, in the order of the request's list. An id at or above a known vocabulary_size is invalid."""
    given_logprobs: npt.ArrayLike
    """For each pair of a token and a given token, the given token's value at the position of the token. Values that are invalid in `logprobs` are also invalid here."""
    mask_sizes: npt.ArrayLike
    """For each token of a row with a mask_bound, the size of the mask: the number of tokens that sampling could choose. A number above a known vocabulary_size is invalid."""
    mask_token_ids: npt.ArrayLike
    """The token ids of each mask that is not larger than the row's mask_bound, in ascending order. An id at or above a known vocabulary_size is invalid."""


class ColumnArrays:
    """The columns as arrays."""

    __slots__ = ('request_ids', 'batch_indices', 'positions', 'statuses', 'token_counts', 'draft_token_counts', 'proposal_counts', 'scorings', 'top_ks', 'token_ids', 'logprobs', 'ranks', 'alternative_token_ids', 'alternative_logprobs', 'proposal_token_ids', 'stops', 'extras', 'given_counts', 'mask_bounds', 'other_logprobs', 'entropies', 'given_token_ids', 'given_logprobs', 'mask_sizes', 'mask_token_ids')

    request_ids: npt.NDArray[np.uint64]
    """For each row, the id of its request. The id is unique among all open requests."""
    batch_indices: npt.NDArray[np.uint32]
    """For each row, its index in the step's original batch. An index at or above step_rows is invalid."""
    positions: npt.NDArray[np.uint32]
    """For each row, the position of its first token in the request's output. Position zero is the first token after the prompt. A row without tokens has the position of the request's next token."""
    statuses: npt.NDArray[np.uint8]
    """For each row, the state of its request after the step."""
    token_counts: npt.NDArray[np.uint8]
    """For each row, the number of its tokens in this message. The row's status restricts the number."""
    draft_token_counts: npt.NDArray[np.uint8]
    """For each row, the number of draft tokens that the target model verified in this step. Zero may also mean that the number is unknown. The number must be zero in a draft batch."""
    proposal_counts: npt.NDArray[np.uint8]
    """For each row, the number of its elements in `proposal_token_ids`. The row's status restricts the number. The number must be zero in a draft batch."""
    scorings: npt.NDArray[np.uint8]
    """For each row, the values that its tokens have in addition to their ids."""
    top_ks: npt.NDArray[np.uint8]
    """For each row, the number of alternatives of each token. A number above a known vocabulary_size is invalid. The number must be zero unless the row's scoring is FULL."""
    token_ids: npt.NDArray[np.uint32]
    """For each token, its id. An id at or above a known vocabulary_size is invalid."""
    logprobs: npt.NDArray[np.float32]
    """For each scored token, its logprob in nats or its logit, as value_kind says. A logprob above zero is invalid. The writer replaces an engine's minus infinity by -9999.0."""
    ranks: npt.NDArray[np.uint32]
    """For each scored token, its rank by value among all tokens. The largest value has rank 1. If several tokens have the same value, any of their ranks is valid. A rank above a known vocabulary_size is invalid, and so is a rank that the token's alternatives contradict."""
    alternative_token_ids: npt.NDArray[np.uint32]
    """For each alternative, its id. A token's alternatives are the top_k tokens with the largest values. The largest value comes first, and equal values are ordered by ascending id. Alternatives in another order are invalid. An id at or above a known vocabulary_size is invalid."""
    alternative_logprobs: npt.NDArray[np.float32]
    """For each alternative, its logprob in nats or its logit, as value_kind says. A logprob above zero is invalid. A value above the value of the token's previous alternative is invalid. A sampled token that is an alternative must have the same value in `logprobs`."""
    proposal_token_ids: npt.NDArray[np.uint32]
    """For each proposal, the id of a draft token that is not verified yet. For example, a prefill worker computes a request's first token and proposes the second token. An id at or above a known vocabulary_size is invalid."""
    stops: npt.NDArray[np.uint8]
    """For each FINISHED_STOP row, which of the request's own stop tokens or stop texts ended the request. Value 1 means a stop token, which is the row's last token. Value n >= 2 means the stop text at index n - 2. Value zero means the model's own end token or an unknown cause. If the column is empty, the cause is unknown for every row."""
    extras: npt.NDArray[np.uint8]
    """For each row, the extra values of each token: 1 for `other_logprobs`, 2 for `entropies`, 3 for both. An empty column means zero for all rows. The value must be zero if the row's scoring is NONE."""
    given_counts: npt.NDArray[np.uint32]
    """For each row, the number of token ids whose values the request wants at each position. An empty column means zero for all rows. The number must be zero unless the row's scoring is FULL."""
    mask_bounds: npt.NDArray[np.uint32]
    """For each row, the maximum mask size. The message lists the token ids of all masks up to this size. A mask is the set of tokens that sampling could choose at one position. If zero, the row has no masks. An empty column means zero for all rows. The size must be zero unless the row's scoring is FULL."""
    other_logprobs: npt.NDArray[np.float32]
    """For each token of a row whose extras are 1 or 3, the token's value in the other distribution. If value_kind is RAW, the other distribution is the distribution after temperature, penalties and masks. If value_kind is PROCESSED, the other distribution is the model's own. Values that are invalid in `logprobs` are also invalid here."""
    entropies: npt.NDArray[np.float32]
    """For each token of a row whose extras are 2 or 3, the entropy in nats of the distribution that value_kind names."""
    given_token_ids: npt.NDArray[np.uint32]
    """For each given token, its id, in the order of the request's list. An id at or above a known vocabulary_size is invalid."""
    given_logprobs: npt.NDArray[np.float32]
    """For each pair of a token and a given token, the given token's value at the position of the token. Values that are invalid in `logprobs` are also invalid here."""
    mask_sizes: npt.NDArray[np.uint32]
    """For each token of a row with a mask_bound, the size of the mask: the number of tokens that sampling could choose. A number above a known vocabulary_size is invalid."""
    mask_token_ids: npt.NDArray[np.uint32]
    """The token ids of each mask that is not larger than the row's mask_bound, in ascending order. An id at or above a known vocabulary_size is invalid."""
