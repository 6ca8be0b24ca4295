# Generated from proto/tokenbus/v1 by `make proto`. Do not edit: CI refuses a stale or edited copy.
"""The data contract's enums."""

from enum import IntEnum


class BatchKind(IntEnum):
    """The model that a batch's tokens come from."""

    UNSPECIFIED = 0
    """Invalid."""
    TARGET = 1
    """The target model, whose accepted tokens are the request's output."""
    DRAFT = 2
    """The draft model, whose tokens are proposals for the same step, whether accepted or not."""


class StepPhase(IntEnum):
    """The part of the generation that a step computes."""

    UNSPECIFIED = 0
    """Invalid."""
    PREFILL = 1
    """The step computed prompts and the first token after each prompt, but no later tokens."""
    DECODE = 2
    """The step computed only tokens that follow earlier tokens."""
    MIXED = 3
    """The step computed prompts and later tokens."""


class SpeculativeMethod(IntEnum):
    """The source of draft tokens. A newer minor version may add methods, so readers accept unknown values."""

    UNSPECIFIED = 0
    """Invalid."""
    NONE = 1
    """The engine does not speculate."""
    NAIVE = 2
    """The engine's speculative code path ran without drafts."""
    NGRAM = 3
    """Draft tokens come from n-grams in the request's own text."""
    SUFFIX = 4
    """Draft tokens come from a suffix tree or a suffix array."""
    MTP = 5
    """Draft tokens come from multi-token-prediction heads."""
    EAGLE = 6
    """Draft tokens come from an EAGLE head."""
    DRAFT_MODEL = 7
    """Draft tokens come from a smaller model."""


class ValueKind(IntEnum):
    """The meaning of the numbers in `logprobs` and `alternative_logprobs`."""

    UNSPECIFIED = 0
    """The message has no logprobs or logits. Invalid if a row is scored."""
    RAW_LOGPROBS = 1
    """Natural logarithms of the model's own probabilities."""
    PROCESSED_LOGPROBS = 2
    """Natural logarithms of the probabilities after temperature, penalties and masks were applied."""
    RAW_LOGITS = 3
    """The model's own logits."""
    PROCESSED_LOGITS = 4
    """The logits after temperature, penalties and masks were applied."""


class RowStatus(IntEnum):
    """The state of a row's request after the step."""

    UNSPECIFIED = 0
    """Invalid."""
    ACTIVE = 1
    """The request received tokens and continues."""
    IDLE = 2
    """The request was in the batch, received no token, and continues."""
    PREFILLING = 3
    """A chunk of the request's prompt was computed, and more chunks follow."""
    PREEMPTED = 4
    """The request was removed from the batch, and will be resumed."""
    HANDED_OFF = 5
    """The request's prefill worker is done, and a decode worker continues. The row has all tokens from the prefill worker."""
    FINISHED_STOP = 6
    """The request ended with a stop token or a stop text."""
    FINISHED_LENGTH = 7
    """The request ended at max_tokens or at the model's length limit."""
    ABORTED = 8
    """The request was ended by its client or by its deadline."""
    UNRECOVERABLE = 9
    """The engine lost the request's state, and cannot compute it again."""


class Scoring(IntEnum):
    """The values that tokens have in addition to their ids."""

    UNSPECIFIED = 0
    """Invalid."""
    NONE = 1
    """The tokens have only ids: the row has no element in `logprobs` and `ranks`, and its top_k must be zero."""
    FULL = 2
    """Each token has a logprob, a rank and top_k alternatives."""
    SHED = 3
    """Each token has a logprob and a rank. The worker dropped the alternatives under load, so the row's top_k must be zero."""
