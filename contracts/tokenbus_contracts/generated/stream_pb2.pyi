# Generated from proto/tokenbus/v1 by `make proto`. Do not edit: CI refuses a stale or edited copy.
from tokenbus_contracts.generated import bounds_pb2 as _bounds_pb2
from tokenbus_contracts.generated import control_pb2 as _control_pb2
from tokenbus_contracts.generated import request_pb2 as _request_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_MIXED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]

class PayloadKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAYLOAD_KIND_UNSPECIFIED: _ClassVar[PayloadKind]
    PAYLOAD_KIND_LOGPROB_BATCH: _ClassVar[PayloadKind]
    PAYLOAD_KIND_REQUEST_EVENT: _ClassVar[PayloadKind]

class RefusalReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_REASON_UNSPECIFIED: _ClassVar[RefusalReason]
    REFUSAL_REASON_SCHEMA_VERSION: _ClassVar[RefusalReason]
    REFUSAL_REASON_LIMITS: _ClassVar[RefusalReason]
    REFUSAL_REASON_WORKER_ID_TAKEN: _ClassVar[RefusalReason]
    REFUSAL_REASON_EPOCH_OUTDATED: _ClassVar[RefusalReason]
    REFUSAL_REASON_TOO_MANY_WORKERS: _ClassVar[RefusalReason]
    REFUSAL_REASON_PROTOCOL: _ClassVar[RefusalReason]
    REFUSAL_REASON_NOT_AUTHORIZED: _ClassVar[RefusalReason]
    REFUSAL_REASON_HELLO_FIRST: _ClassVar[RefusalReason]
    REFUSAL_REASON_SESSION_TAKEN: _ClassVar[RefusalReason]

class GapReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GAP_REASON_UNSPECIFIED: _ClassVar[GapReason]
    GAP_REASON_RETENTION: _ClassVar[GapReason]
    GAP_REASON_REFUSED: _ClassVar[GapReason]
    GAP_REASON_WORKER_LOST: _ClassVar[GapReason]

class GoodbyeReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GOODBYE_REASON_UNSPECIFIED: _ClassVar[GoodbyeReason]
    GOODBYE_REASON_STOPPED: _ClassVar[GoodbyeReason]
    GOODBYE_REASON_FAILED: _ClassVar[GoodbyeReason]
    GOODBYE_REASON_RESTARTING: _ClassVar[GoodbyeReason]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_MIXED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
PAYLOAD_KIND_UNSPECIFIED: PayloadKind
PAYLOAD_KIND_LOGPROB_BATCH: PayloadKind
PAYLOAD_KIND_REQUEST_EVENT: PayloadKind
REFUSAL_REASON_UNSPECIFIED: RefusalReason
REFUSAL_REASON_SCHEMA_VERSION: RefusalReason
REFUSAL_REASON_LIMITS: RefusalReason
REFUSAL_REASON_WORKER_ID_TAKEN: RefusalReason
REFUSAL_REASON_EPOCH_OUTDATED: RefusalReason
REFUSAL_REASON_TOO_MANY_WORKERS: RefusalReason
REFUSAL_REASON_PROTOCOL: RefusalReason
REFUSAL_REASON_NOT_AUTHORIZED: RefusalReason
REFUSAL_REASON_HELLO_FIRST: RefusalReason
REFUSAL_REASON_SESSION_TAKEN: RefusalReason
GAP_REASON_UNSPECIFIED: GapReason
GAP_REASON_RETENTION: GapReason
GAP_REASON_REFUSED: GapReason
GAP_REASON_WORKER_LOST: GapReason
GOODBYE_REASON_UNSPECIFIED: GoodbyeReason
GOODBYE_REASON_STOPPED: GoodbyeReason
GOODBYE_REASON_FAILED: GoodbyeReason
GOODBYE_REASON_RESTARTING: GoodbyeReason

class WorkerFrame(_message.Message):
    __slots__ = ("epoch", "hello", "item", "gap", "heartbeat", "goodbye")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    hello: Hello
    item: Item
    gap: Gap
    heartbeat: Heartbeat
    goodbye: Goodbye
    def __init__(self, epoch: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., item: _Optional[_Union[Item, _Mapping]] = ..., gap: _Optional[_Union[Gap, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class ProcessorFrame(_message.Message):
    __slots__ = ("welcome", "refusal", "credit", "ack", "replay", "heartbeat", "goodbye", "generate", "abort", "control")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refusal: Refusal
    credit: Credit
    ack: Ack
    replay: ReplayRequest
    heartbeat: Heartbeat
    goodbye: Goodbye
    generate: _request_pb2.Generate
    abort: _request_pb2.Abort
    control: _control_pb2.Control
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., replay: _Optional[_Union[ReplayRequest, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., generate: _Optional[_Union[_request_pb2.Generate, _Mapping]] = ..., abort: _Optional[_Union[_request_pb2.Abort, _Mapping]] = ..., control: _Optional[_Union[_control_pb2.Control, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("schema_major", "schema_minor", "worker_id", "role", "limits", "model", "vocabulary_size", "first_sequence", "next_sequence", "tp_rank", "dp_rank", "max_requests", "request_ids", "proof", "request_owners", "max_model_tokens", "tokenizer_digest", "lora_adapters", "processors", "tokenizer_probes", "takes_control", "longest_step_ms", "paused_since_unix_ms", "paused_by", "weight_version", "continues_requests", "token_scores")
    SCHEMA_MAJOR_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_MINOR_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    REQUEST_OWNERS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LORA_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PROCESSORS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_PROBES_FIELD_NUMBER: _ClassVar[int]
    TAKES_CONTROL_FIELD_NUMBER: _ClassVar[int]
    LONGEST_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_BY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SCORES_FIELD_NUMBER: _ClassVar[int]
    schema_major: int
    schema_minor: int
    worker_id: str
    role: WorkerRole
    limits: StreamLimits
    model: str
    vocabulary_size: int
    first_sequence: int
    next_sequence: int
    tp_rank: int
    dp_rank: int
    max_requests: int
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    proof: bytes
    request_owners: _containers.RepeatedScalarFieldContainer[int]
    max_model_tokens: int
    tokenizer_digest: int
    lora_adapters: _containers.RepeatedScalarFieldContainer[str]
    processors: int
    tokenizer_probes: _containers.RepeatedScalarFieldContainer[int]
    takes_control: bool
    longest_step_ms: int
    paused_since_unix_ms: int
    paused_by: str
    weight_version: int
    continues_requests: bool
    token_scores: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, schema_major: _Optional[int] = ..., schema_minor: _Optional[int] = ..., worker_id: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., limits: _Optional[_Union[StreamLimits, _Mapping]] = ..., model: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., first_sequence: _Optional[int] = ..., next_sequence: _Optional[int] = ..., tp_rank: _Optional[int] = ..., dp_rank: _Optional[int] = ..., max_requests: _Optional[int] = ..., request_ids: _Optional[_Iterable[int]] = ..., proof: _Optional[bytes] = ..., request_owners: _Optional[_Iterable[int]] = ..., max_model_tokens: _Optional[int] = ..., tokenizer_digest: _Optional[int] = ..., lora_adapters: _Optional[_Iterable[str]] = ..., processors: _Optional[int] = ..., tokenizer_probes: _Optional[_Iterable[int]] = ..., takes_control: bool = ..., longest_step_ms: _Optional[int] = ..., paused_since_unix_ms: _Optional[int] = ..., paused_by: _Optional[str] = ..., weight_version: _Optional[int] = ..., continues_requests: bool = ..., token_scores: _Optional[_Iterable[str]] = ...) -> None: ...

class StreamLimits(_message.Message):
    __slots__ = ("max_message_bytes", "max_rows", "max_tokens_per_row", "max_draft_tokens_per_row", "max_top_k")
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_PER_ROW_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_PER_ROW_FIELD_NUMBER: _ClassVar[int]
    MAX_TOP_K_FIELD_NUMBER: _ClassVar[int]
    max_message_bytes: int
    max_rows: int
    max_tokens_per_row: int
    max_draft_tokens_per_row: int
    max_top_k: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., max_rows: _Optional[int] = ..., max_tokens_per_row: _Optional[int] = ..., max_draft_tokens_per_row: _Optional[int] = ..., max_top_k: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("processor_id", "schema_minor", "resume_from", "credit", "heartbeat_interval_ms", "heartbeat_timeout_ms")
    PROCESSOR_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_MINOR_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    processor_id: str
    schema_minor: int
    resume_from: int
    credit: Credit
    heartbeat_interval_ms: int
    heartbeat_timeout_ms: int
    def __init__(self, processor_id: _Optional[str] = ..., schema_minor: _Optional[int] = ..., resume_from: _Optional[int] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., heartbeat_interval_ms: _Optional[int] = ..., heartbeat_timeout_ms: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: RefusalReason
    message: str
    def __init__(self, reason: _Optional[_Union[RefusalReason, str]] = ..., message: _Optional[str] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("through_sequence", "bytes")
    THROUGH_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    through_sequence: int
    bytes: int
    def __init__(self, through_sequence: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("sequence", "payload_kind", "payload_bytes", "payload_crc32")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_KIND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_CRC32_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    payload_kind: PayloadKind
    payload_bytes: int
    payload_crc32: int
    def __init__(self, sequence: _Optional[int] = ..., payload_kind: _Optional[_Union[PayloadKind, str]] = ..., payload_bytes: _Optional[int] = ..., payload_crc32: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("through_sequence",)
    THROUGH_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    through_sequence: int
    def __init__(self, through_sequence: _Optional[int] = ...) -> None: ...

class ReplayRequest(_message.Message):
    __slots__ = ("first_sequence", "last_sequence")
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    first_sequence: int
    last_sequence: int
    def __init__(self, first_sequence: _Optional[int] = ..., last_sequence: _Optional[int] = ...) -> None: ...

class Gap(_message.Message):
    __slots__ = ("first_sequence", "last_sequence", "reason", "request_ids")
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    first_sequence: int
    last_sequence: int
    reason: GapReason
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_sequence: _Optional[int] = ..., last_sequence: _Optional[int] = ..., reason: _Optional[_Union[GapReason, str]] = ..., request_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sent_at_ns", "echo_ns", "last_sequence", "takes_no_more", "stalled_ms", "kv_cache_permille")
    SENT_AT_NS_FIELD_NUMBER: _ClassVar[int]
    ECHO_NS_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TAKES_NO_MORE_FIELD_NUMBER: _ClassVar[int]
    STALLED_MS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_PERMILLE_FIELD_NUMBER: _ClassVar[int]
    sent_at_ns: int
    echo_ns: int
    last_sequence: int
    takes_no_more: bool
    stalled_ms: int
    kv_cache_permille: int
    def __init__(self, sent_at_ns: _Optional[int] = ..., echo_ns: _Optional[int] = ..., last_sequence: _Optional[int] = ..., takes_no_more: bool = ..., stalled_ms: _Optional[int] = ..., kv_cache_permille: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason", "message", "last_sequence")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    reason: GoodbyeReason
    message: str
    last_sequence: int
    def __init__(self, reason: _Optional[_Union[GoodbyeReason, str]] = ..., message: _Optional[str] = ..., last_sequence: _Optional[int] = ...) -> None: ...
