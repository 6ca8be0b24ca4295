# Generated from proto/tokenbus/v1 by `make proto`. Do not edit: CI refuses a stale or edited copy.
"""The data contract's enums."""

from enum import IntEnum


class BatchKind(IntEnum):
    """Which model a batch's tokens come from."""

    UNSPECIFIED = 0
    """Not set; invalid."""
    TARGET = 1
    """Tokens that were accepted: the request's output."""
    DRAFT = 2
    """Tokens that the draft model proposed for the same step, accepted or not."""


class StepPhase(IntEnum):
    """What the step computed for its rows."""

    UNSPECIFIED = 0
    """Not set; invalid."""
    PREFILL = 1
    """Only prompts, and the first token after each."""
    DECODE = 2
    """Only tokens that follow earlier ones."""
    MIXED = 3
    """Rows of both."""


class SpeculativeMethod(IntEnum):
    """Where the draft tokens come from. A newer minor may add methods: an unknown one passes."""

    UNSPECIFIED = 0
    """Not set; invalid."""
    NONE = 1
    """No speculation."""
    NAIVE = 2
    """The speculative path with nothing drafted."""
    NGRAM = 3
    """Drafts looked up by n-gram in the request's own text."""
    SUFFIX = 4
    """Drafts looked up in a suffix tree or array."""
    MTP = 5
    """Drafts from multi-token-prediction heads."""
    EAGLE = 6
    """Drafts from an EAGLE head."""
    DRAFT_MODEL = 7
    """Drafts from a smaller model."""


class ValueKind(IntEnum):
    """What the numbers in `logprobs` and `alternative_logprobs` are."""

    UNSPECIFIED = 0
    """The message holds no such numbers; invalid if a row is scored."""
    RAW_LOGPROBS = 1
    """Natural logarithms of the model's own probabilities."""
    PROCESSED_LOGPROBS = 2
    """Natural logarithms of the probabilities after temperature, penalties and masks."""
    RAW_LOGITS = 3
    """The model's own logits."""
    PROCESSED_LOGITS = 4
    """The logits after temperature, penalties and masks."""


class RowStatus(IntEnum):
    """What became of a row's request in this step."""

    UNSPECIFIED = 0
    """Not set; invalid."""
    ACTIVE = 1
    """It got tokens and goes on."""
    IDLE = 2
    """It was in the batch, got nothing, and goes on."""
    PREFILLING = 3
    """A chunk of its prompt was computed, and more is to come."""
    PREEMPTED = 4
    """It was taken out of the batch and will be resumed."""
    HANDED_OFF = 5
    """This worker is done with it; another worker goes on. The row has all of the tokens that this worker gave it."""
    FINISHED_STOP = 6
    """It ended: a stop token or a stop string was met."""
    FINISHED_LENGTH = 7
    """It ended: as many tokens as were asked for, or as fit."""
    ABORTED = 8
    """It was aborted by its client or its deadline."""
    UNRECOVERABLE = 9
    """It ended because its state is lost and cannot be computed again."""


class Scoring(IntEnum):
    """What is known of a row's tokens beyond their ids."""

    UNSPECIFIED = 0
    """Not set; invalid."""
    NONE = 1
    """Ids only: the row has no element in `logprobs` and `ranks`, and its top_k must be zero."""
    FULL = 2
    """Every token has its logprob and rank, and top_k alternatives."""
    SHED = 3
    """Every token has its logprob and rank; its alternatives were dropped under load, and its top_k must be zero."""
