# Generated from proto/tokenbus/v1 by `make proto`. Do not edit: CI refuses a stale or edited copy.
from tokenbus_contracts.generated import bounds_pb2 as _bounds_pb2
from tokenbus_contracts.generated import control_pb2 as _control_pb2
from tokenbus_contracts.generated import request_pb2 as _request_pb2
from tokenbus_contracts.generated import stream_pb2 as _stream_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClientFrame(_message.Message):
    __slots__ = ("hello", "generate", "abort", "resume", "confirm", "watch", "heartbeat", "goodbye", "status", "ended", "control")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    WATCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    hello: ClientHello
    generate: _request_pb2.Generate
    abort: _request_pb2.Abort
    resume: Resume
    confirm: Confirm
    watch: Watch
    heartbeat: _stream_pb2.Heartbeat
    goodbye: _stream_pb2.Goodbye
    status: StatusRequest
    ended: Ended
    control: _control_pb2.Control
    def __init__(self, hello: _Optional[_Union[ClientHello, _Mapping]] = ..., generate: _Optional[_Union[_request_pb2.Generate, _Mapping]] = ..., abort: _Optional[_Union[_request_pb2.Abort, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., confirm: _Optional[_Union[Confirm, _Mapping]] = ..., watch: _Optional[_Union[Watch, _Mapping]] = ..., heartbeat: _Optional[_Union[_stream_pb2.Heartbeat, _Mapping]] = ..., goodbye: _Optional[_Union[_stream_pb2.Goodbye, _Mapping]] = ..., status: _Optional[_Union[StatusRequest, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., control: _Optional[_Union[_control_pb2.Control, _Mapping]] = ...) -> None: ...

class ServerFrame(_message.Message):
    __slots__ = ("number", "welcome", "refusal", "admitted", "outputs", "error", "watched_stream", "watched_item", "heartbeat", "goodbye", "status", "room", "prompt_scores", "control_answer")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WATCHED_STREAM_FIELD_NUMBER: _ClassVar[int]
    WATCHED_ITEM_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORES_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ANSWER_FIELD_NUMBER: _ClassVar[int]
    number: int
    welcome: ClientWelcome
    refusal: _stream_pb2.Refusal
    admitted: _request_pb2.Admitted
    outputs: Outputs
    error: _request_pb2.RequestError
    watched_stream: WatchedStream
    watched_item: _stream_pb2.Item
    heartbeat: _stream_pb2.Heartbeat
    goodbye: _stream_pb2.Goodbye
    status: ProcessorStatus
    room: Room
    prompt_scores: _request_pb2.PromptScoresChunk
    control_answer: _control_pb2.ControlAnswer
    def __init__(self, number: _Optional[int] = ..., welcome: _Optional[_Union[ClientWelcome, _Mapping]] = ..., refusal: _Optional[_Union[_stream_pb2.Refusal, _Mapping]] = ..., admitted: _Optional[_Union[_request_pb2.Admitted, _Mapping]] = ..., outputs: _Optional[_Union[Outputs, _Mapping]] = ..., error: _Optional[_Union[_request_pb2.RequestError, _Mapping]] = ..., watched_stream: _Optional[_Union[WatchedStream, _Mapping]] = ..., watched_item: _Optional[_Union[_stream_pb2.Item, _Mapping]] = ..., heartbeat: _Optional[_Union[_stream_pb2.Heartbeat, _Mapping]] = ..., goodbye: _Optional[_Union[_stream_pb2.Goodbye, _Mapping]] = ..., status: _Optional[_Union[ProcessorStatus, _Mapping]] = ..., room: _Optional[_Union[Room, _Mapping]] = ..., prompt_scores: _Optional[_Union[_request_pb2.PromptScoresChunk, _Mapping]] = ..., control_answer: _Optional[_Union[_control_pb2.ControlAnswer, _Mapping]] = ...) -> None: ...

class ClientHello(_message.Message):
    __slots__ = ("schema_major", "schema_minor", "name", "window_frames", "window_bytes", "session", "proof", "wants_room")
    SCHEMA_MAJOR_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_MINOR_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FRAMES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    WANTS_ROOM_FIELD_NUMBER: _ClassVar[int]
    schema_major: int
    schema_minor: int
    name: str
    window_frames: int
    window_bytes: int
    session: int
    proof: bytes
    wants_room: bool
    def __init__(self, schema_major: _Optional[int] = ..., schema_minor: _Optional[int] = ..., name: _Optional[str] = ..., window_frames: _Optional[int] = ..., window_bytes: _Optional[int] = ..., session: _Optional[int] = ..., proof: _Optional[bytes] = ..., wants_room: bool = ...) -> None: ...

class ClientWelcome(_message.Message):
    __slots__ = ("processor_id", "schema_minor", "heartbeat_interval_ms", "heartbeat_timeout_ms", "resumed", "owner")
    PROCESSOR_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_MINOR_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    processor_id: str
    schema_minor: int
    heartbeat_interval_ms: int
    heartbeat_timeout_ms: int
    resumed: bool
    owner: int
    def __init__(self, processor_id: _Optional[str] = ..., schema_minor: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ..., heartbeat_timeout_ms: _Optional[int] = ..., resumed: bool = ..., owner: _Optional[int] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("request_id", "next_position", "include_draft_logprobs", "deadline_unix_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_POSITION_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_DRAFT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    next_position: int
    include_draft_logprobs: bool
    deadline_unix_ms: int
    def __init__(self, request_id: _Optional[int] = ..., next_position: _Optional[int] = ..., include_draft_logprobs: bool = ..., deadline_unix_ms: _Optional[int] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Confirm(_message.Message):
    __slots__ = ("through_number",)
    THROUGH_NUMBER_FIELD_NUMBER: _ClassVar[int]
    through_number: int
    def __init__(self, through_number: _Optional[int] = ...) -> None: ...

class Watch(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class Outputs(_message.Message):
    __slots__ = ("has_draft",)
    HAS_DRAFT_FIELD_NUMBER: _ClassVar[int]
    has_draft: bool
    def __init__(self, has_draft: bool = ...) -> None: ...

class WatchedStream(_message.Message):
    __slots__ = ("epoch", "hello")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    hello: _stream_pb2.Hello
    def __init__(self, epoch: _Optional[int] = ..., hello: _Optional[_Union[_stream_pb2.Hello, _Mapping]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProcessorStatus(_message.Message):
    __slots__ = ("open_requests", "finished_requests", "failed_requests", "refused_requests", "connected_clients", "steps", "tokens", "lost_items", "gaps", "workers")
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_CLIENTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOST_ITEMS_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    open_requests: int
    finished_requests: int
    failed_requests: int
    refused_requests: int
    connected_clients: int
    steps: int
    tokens: int
    lost_items: int
    gaps: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    def __init__(self, open_requests: _Optional[int] = ..., finished_requests: _Optional[int] = ..., failed_requests: _Optional[int] = ..., refused_requests: _Optional[int] = ..., connected_clients: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., lost_items: _Optional[int] = ..., gaps: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "epoch", "role", "model", "is_connected", "open_requests", "lag_items", "pending_items", "steps", "tokens", "gaps", "replays", "draft_tokens", "accepted_tokens", "max_model_tokens", "tokenizer_digest", "lora_adapters", "processor_id", "tokenizer_probes", "is_stalled", "paused_since_unix_ms", "paused_by", "kv_cache_permille", "token_scores")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IS_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LAG_ITEMS_FIELD_NUMBER: _ClassVar[int]
    PENDING_ITEMS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    REPLAYS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LORA_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_PROBES_FIELD_NUMBER: _ClassVar[int]
    IS_STALLED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_BY_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_PERMILLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SCORES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    role: _stream_pb2.WorkerRole
    model: str
    is_connected: bool
    open_requests: int
    lag_items: int
    pending_items: int
    steps: int
    tokens: int
    gaps: int
    replays: int
    draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted_tokens: _containers.RepeatedScalarFieldContainer[int]
    max_model_tokens: int
    tokenizer_digest: int
    lora_adapters: _containers.RepeatedScalarFieldContainer[str]
    processor_id: str
    tokenizer_probes: _containers.RepeatedScalarFieldContainer[int]
    is_stalled: bool
    paused_since_unix_ms: int
    paused_by: str
    kv_cache_permille: int
    token_scores: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[_Union[_stream_pb2.WorkerRole, str]] = ..., model: _Optional[str] = ..., is_connected: bool = ..., open_requests: _Optional[int] = ..., lag_items: _Optional[int] = ..., pending_items: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., gaps: _Optional[int] = ..., replays: _Optional[int] = ..., draft_tokens: _Optional[_Iterable[int]] = ..., accepted_tokens: _Optional[_Iterable[int]] = ..., max_model_tokens: _Optional[int] = ..., tokenizer_digest: _Optional[int] = ..., lora_adapters: _Optional[_Iterable[str]] = ..., processor_id: _Optional[str] = ..., tokenizer_probes: _Optional[_Iterable[int]] = ..., is_stalled: bool = ..., paused_since_unix_ms: _Optional[int] = ..., paused_by: _Optional[str] = ..., kv_cache_permille: _Optional[int] = ..., token_scores: _Optional[_Iterable[str]] = ...) -> None: ...

class Room(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelRoom]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelRoom, _Mapping]]] = ...) -> None: ...

class ModelRoom(_message.Message):
    __slots__ = ("model", "free_requests", "workers")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FREE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    free_requests: int
    workers: int
    def __init__(self, model: _Optional[str] = ..., free_requests: _Optional[int] = ..., workers: _Optional[int] = ...) -> None: ...
