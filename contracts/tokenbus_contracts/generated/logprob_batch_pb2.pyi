# Generated from proto/tokenbus/v1 by `make proto`. Do not edit: CI refuses a stale or edited copy.
from tokenbus_contracts.generated import bounds_pb2 as _bounds_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BatchKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BATCH_KIND_UNSPECIFIED: _ClassVar[BatchKind]
    BATCH_KIND_TARGET: _ClassVar[BatchKind]
    BATCH_KIND_DRAFT: _ClassVar[BatchKind]

class StepPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_PHASE_UNSPECIFIED: _ClassVar[StepPhase]
    STEP_PHASE_PREFILL: _ClassVar[StepPhase]
    STEP_PHASE_DECODE: _ClassVar[StepPhase]
    STEP_PHASE_MIXED: _ClassVar[StepPhase]

class SpeculativeMethod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPECULATIVE_METHOD_UNSPECIFIED: _ClassVar[SpeculativeMethod]
    SPECULATIVE_METHOD_NONE: _ClassVar[SpeculativeMethod]
    SPECULATIVE_METHOD_NAIVE: _ClassVar[SpeculativeMethod]
    SPECULATIVE_METHOD_NGRAM: _ClassVar[SpeculativeMethod]
    SPECULATIVE_METHOD_SUFFIX: _ClassVar[SpeculativeMethod]
    SPECULATIVE_METHOD_MTP: _ClassVar[SpeculativeMethod]
    SPECULATIVE_METHOD_EAGLE: _ClassVar[SpeculativeMethod]
    SPECULATIVE_METHOD_DRAFT_MODEL: _ClassVar[SpeculativeMethod]

class ValueKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VALUE_KIND_UNSPECIFIED: _ClassVar[ValueKind]
    VALUE_KIND_RAW_LOGPROBS: _ClassVar[ValueKind]
    VALUE_KIND_PROCESSED_LOGPROBS: _ClassVar[ValueKind]
    VALUE_KIND_RAW_LOGITS: _ClassVar[ValueKind]
    VALUE_KIND_PROCESSED_LOGITS: _ClassVar[ValueKind]

class RowStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_STATUS_UNSPECIFIED: _ClassVar[RowStatus]
    ROW_STATUS_ACTIVE: _ClassVar[RowStatus]
    ROW_STATUS_IDLE: _ClassVar[RowStatus]
    ROW_STATUS_PREFILLING: _ClassVar[RowStatus]
    ROW_STATUS_PREEMPTED: _ClassVar[RowStatus]
    ROW_STATUS_HANDED_OFF: _ClassVar[RowStatus]
    ROW_STATUS_FINISHED_STOP: _ClassVar[RowStatus]
    ROW_STATUS_FINISHED_LENGTH: _ClassVar[RowStatus]
    ROW_STATUS_ABORTED: _ClassVar[RowStatus]
    ROW_STATUS_UNRECOVERABLE: _ClassVar[RowStatus]

class Scoring(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCORING_UNSPECIFIED: _ClassVar[Scoring]
    SCORING_NONE: _ClassVar[Scoring]
    SCORING_FULL: _ClassVar[Scoring]
    SCORING_SHED: _ClassVar[Scoring]
BATCH_KIND_UNSPECIFIED: BatchKind
BATCH_KIND_TARGET: BatchKind
BATCH_KIND_DRAFT: BatchKind
STEP_PHASE_UNSPECIFIED: StepPhase
STEP_PHASE_PREFILL: StepPhase
STEP_PHASE_DECODE: StepPhase
STEP_PHASE_MIXED: StepPhase
SPECULATIVE_METHOD_UNSPECIFIED: SpeculativeMethod
SPECULATIVE_METHOD_NONE: SpeculativeMethod
SPECULATIVE_METHOD_NAIVE: SpeculativeMethod
SPECULATIVE_METHOD_NGRAM: SpeculativeMethod
SPECULATIVE_METHOD_SUFFIX: SpeculativeMethod
SPECULATIVE_METHOD_MTP: SpeculativeMethod
SPECULATIVE_METHOD_EAGLE: SpeculativeMethod
SPECULATIVE_METHOD_DRAFT_MODEL: SpeculativeMethod
VALUE_KIND_UNSPECIFIED: ValueKind
VALUE_KIND_RAW_LOGPROBS: ValueKind
VALUE_KIND_PROCESSED_LOGPROBS: ValueKind
VALUE_KIND_RAW_LOGITS: ValueKind
VALUE_KIND_PROCESSED_LOGITS: ValueKind
ROW_STATUS_UNSPECIFIED: RowStatus
ROW_STATUS_ACTIVE: RowStatus
ROW_STATUS_IDLE: RowStatus
ROW_STATUS_PREFILLING: RowStatus
ROW_STATUS_PREEMPTED: RowStatus
ROW_STATUS_HANDED_OFF: RowStatus
ROW_STATUS_FINISHED_STOP: RowStatus
ROW_STATUS_FINISHED_LENGTH: RowStatus
ROW_STATUS_ABORTED: RowStatus
ROW_STATUS_UNRECOVERABLE: RowStatus
SCORING_UNSPECIFIED: Scoring
SCORING_NONE: Scoring
SCORING_FULL: Scoring
SCORING_SHED: Scoring

class LogprobBatch(_message.Message):
    __slots__ = ("header", "request_ids", "batch_indices", "positions", "statuses", "token_counts", "draft_token_counts", "proposal_counts", "scorings", "top_ks", "token_ids", "logprobs", "ranks", "alternative_token_ids", "alternative_logprobs", "proposal_token_ids", "stops", "extras", "given_counts", "mask_bounds", "other_logprobs", "entropies", "given_token_ids", "given_logprobs", "mask_sizes", "mask_token_ids")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    BATCH_INDICES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SCORINGS_FIELD_NUMBER: _ClassVar[int]
    TOP_KS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    GIVEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    MASK_BOUNDS_FIELD_NUMBER: _ClassVar[int]
    OTHER_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENTROPIES_FIELD_NUMBER: _ClassVar[int]
    GIVEN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GIVEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MASK_SIZES_FIELD_NUMBER: _ClassVar[int]
    MASK_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    header: BatchHeader
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    batch_indices: _containers.RepeatedScalarFieldContainer[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    statuses: _containers.RepeatedScalarFieldContainer[RowStatus]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    draft_token_counts: _containers.RepeatedScalarFieldContainer[int]
    proposal_counts: _containers.RepeatedScalarFieldContainer[int]
    scorings: _containers.RepeatedScalarFieldContainer[Scoring]
    top_ks: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    alternative_token_ids: _containers.RepeatedScalarFieldContainer[int]
    alternative_logprobs: _containers.RepeatedScalarFieldContainer[float]
    proposal_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stops: _containers.RepeatedScalarFieldContainer[int]
    extras: _containers.RepeatedScalarFieldContainer[int]
    given_counts: _containers.RepeatedScalarFieldContainer[int]
    mask_bounds: _containers.RepeatedScalarFieldContainer[int]
    other_logprobs: _containers.RepeatedScalarFieldContainer[float]
    entropies: _containers.RepeatedScalarFieldContainer[float]
    given_token_ids: _containers.RepeatedScalarFieldContainer[int]
    given_logprobs: _containers.RepeatedScalarFieldContainer[float]
    mask_sizes: _containers.RepeatedScalarFieldContainer[int]
    mask_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, header: _Optional[_Union[BatchHeader, _Mapping]] = ..., request_ids: _Optional[_Iterable[int]] = ..., batch_indices: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ..., statuses: _Optional[_Iterable[_Union[RowStatus, str]]] = ..., token_counts: _Optional[_Iterable[int]] = ..., draft_token_counts: _Optional[_Iterable[int]] = ..., proposal_counts: _Optional[_Iterable[int]] = ..., scorings: _Optional[_Iterable[_Union[Scoring, str]]] = ..., top_ks: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., alternative_token_ids: _Optional[_Iterable[int]] = ..., alternative_logprobs: _Optional[_Iterable[float]] = ..., proposal_token_ids: _Optional[_Iterable[int]] = ..., stops: _Optional[_Iterable[int]] = ..., extras: _Optional[_Iterable[int]] = ..., given_counts: _Optional[_Iterable[int]] = ..., mask_bounds: _Optional[_Iterable[int]] = ..., other_logprobs: _Optional[_Iterable[float]] = ..., entropies: _Optional[_Iterable[float]] = ..., given_token_ids: _Optional[_Iterable[int]] = ..., given_logprobs: _Optional[_Iterable[float]] = ..., mask_sizes: _Optional[_Iterable[int]] = ..., mask_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class BatchHeader(_message.Message):
    __slots__ = ("schema_major", "schema_minor", "worker_id", "epoch", "sequence", "step", "part_index", "part_count", "step_rows", "selection", "kind", "phase", "method", "value_kind", "tp_rank", "dp_rank", "vocabulary_size", "weight_version", "produced_at_ns", "draft_follows")
    SCHEMA_MAJOR_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_MINOR_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PART_INDEX_FIELD_NUMBER: _ClassVar[int]
    PART_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_ROWS_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    VALUE_KIND_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PRODUCED_AT_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    schema_major: int
    schema_minor: int
    worker_id: str
    epoch: int
    sequence: int
    step: int
    part_index: int
    part_count: int
    step_rows: int
    selection: bool
    kind: BatchKind
    phase: StepPhase
    method: SpeculativeMethod
    value_kind: ValueKind
    tp_rank: int
    dp_rank: int
    vocabulary_size: int
    weight_version: int
    produced_at_ns: int
    draft_follows: bool
    def __init__(self, schema_major: _Optional[int] = ..., schema_minor: _Optional[int] = ..., worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., step: _Optional[int] = ..., part_index: _Optional[int] = ..., part_count: _Optional[int] = ..., step_rows: _Optional[int] = ..., selection: bool = ..., kind: _Optional[_Union[BatchKind, str]] = ..., phase: _Optional[_Union[StepPhase, str]] = ..., method: _Optional[_Union[SpeculativeMethod, str]] = ..., value_kind: _Optional[_Union[ValueKind, str]] = ..., tp_rank: _Optional[int] = ..., dp_rank: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., weight_version: _Optional[int] = ..., produced_at_ns: _Optional[int] = ..., draft_follows: bool = ...) -> None: ...
