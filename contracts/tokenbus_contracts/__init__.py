"""The contract of Tokenbus: a step's tokens and logprobs as one versioned, bounded protobuf message."""

from tokenbus_contracts.batch import LogprobBatch
from tokenbus_contracts.codec import decode, encode
from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.extras import Extra, Extras
from tokenbus_contracts.generated.enums import BatchKind, RowStatus, Scoring, SpeculativeMethod, StepPhase, ValueKind
from tokenbus_contracts.header import BatchHeader
from tokenbus_contracts.limits import Limits
from tokenbus_contracts.prompt_scores import PromptScores
from tokenbus_contracts.rows import Row

__all__ = [
    "BatchHeader",
    "BatchKind",
    "ContractError",
    "Extra",
    "Extras",
    "Limits",
    "LogprobBatch",
    "PromptScores",
    "Row",
    "RowStatus",
    "Rule",
    "Scoring",
    "SpeculativeMethod",
    "StepPhase",
    "ValueKind",
    "decode",
    "encode",
]
