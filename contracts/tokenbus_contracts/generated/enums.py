# Generated from proto/tokenbus/v1 by `make proto`. Do not edit: CI refuses a stale or edited copy.
"""The data contract's enums."""

from enum import IntEnum


class BatchKind(IntEnum):
    """The model that a batch's tokens come from."""

    UNSPECIFIED = 0
    """Invalid."""
    TARGET = 1
    """The target model: accepted tokens, which are the request's output."""
    DRAFT = 2
    """The draft model: its proposals for the same step, accepted or not."""


class StepPhase(IntEnum):
    """The kind of work in a step."""

    UNSPECIFIED = 0
    """Invalid."""
    PREFILL = 1
    """Only prompts, and the first token after each."""
    DECODE = 2
    """Only tokens that follow earlier ones."""
    MIXED = 3
    """Rows of both kinds."""


class SpeculativeMethod(IntEnum):
    """The source of draft tokens. A newer minor version may add methods: an unknown value passes."""

    UNSPECIFIED = 0
    """Invalid."""
    NONE = 1
    """No speculation."""
    NAIVE = 2
    """The engine's speculative code path ran without drafts."""
    NGRAM = 3
    """N-grams in the request's own text."""
    SUFFIX = 4
    """A suffix tree or array."""
    MTP = 5
    """Multi-token-prediction heads."""
    EAGLE = 6
    """An EAGLE head."""
    DRAFT_MODEL = 7
    """A smaller model."""


class ValueKind(IntEnum):
    """The meaning of the numbers in `logprobs` and `alternative_logprobs`."""

    UNSPECIFIED = 0
    """The message has no such numbers. Invalid if a row is scored."""
    RAW_LOGPROBS = 1
    """Natural logarithms of the model's own probabilities."""
    PROCESSED_LOGPROBS = 2
    """Natural logarithms of the probabilities after temperature, penalties and masks."""
    RAW_LOGITS = 3
    """The model's own logits."""
    PROCESSED_LOGITS = 4
    """The logits after temperature, penalties and masks."""


class RowStatus(IntEnum):
    """The state of a row's request after the step."""

    UNSPECIFIED = 0
    """Invalid."""
    ACTIVE = 1
    """It got tokens and continues."""
    IDLE = 2
    """It was in the batch, got no token, and continues."""
    PREFILLING = 3
    """A chunk of its prompt was computed, and more chunks follow."""
    PREEMPTED = 4
    """It was removed from the batch, and will be resumed."""
    HANDED_OFF = 5
    """Its prefill worker is done: the row has all tokens from this worker, and a decode worker continues."""
    FINISHED_STOP = 6
    """It ended with a stop token or a stop text."""
    FINISHED_LENGTH = 7
    """It ended at max_tokens, or at the model's limit."""
    ABORTED = 8
    """Its client or its deadline ended it."""
    UNRECOVERABLE = 9
    """The engine lost its state, and cannot compute it again."""


class Scoring(IntEnum):
    """The values that a row's tokens have besides their ids."""

    UNSPECIFIED = 0
    """Invalid."""
    NONE = 1
    """Ids only: the row has no element in `logprobs` and `ranks`, and its top_k must be zero."""
    FULL = 2
    """Each token has its logprob and rank, and top_k alternatives."""
    SHED = 3
    """Each token has its logprob and rank. The worker dropped its alternatives under load, so its top_k must be zero."""
