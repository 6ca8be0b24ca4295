# Generated from proto/tokenbus/v1 by `make proto`. Do not edit: CI refuses a stale or edited copy.
from tokenbus_contracts.generated import bounds_pb2 as _bounds_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID_REQUEST: _ClassVar[ErrorCode]
    ERROR_CODE_DUPLICATE_REQUEST: _ClassVar[ErrorCode]
    ERROR_CODE_UNKNOWN_REQUEST: _ClassVar[ErrorCode]
    ERROR_CODE_OVERLOADED: _ClassVar[ErrorCode]
    ERROR_CODE_NO_WORKER: _ClassVar[ErrorCode]
    ERROR_CODE_WORKER_LOST: _ClassVar[ErrorCode]
    ERROR_CODE_GAP: _ClassVar[ErrorCode]
    ERROR_CODE_ENGINE: _ClassVar[ErrorCode]
    ERROR_CODE_UNRECOVERABLE: _ClassVar[ErrorCode]
    ERROR_CODE_HANDOFF: _ClassVar[ErrorCode]
    ERROR_CODE_ABORTED: _ClassVar[ErrorCode]
    ERROR_CODE_DEADLINE: _ClassVar[ErrorCode]
    ERROR_CODE_SLOW_CLIENT: _ClassVar[ErrorCode]
    ERROR_CODE_INTERNAL: _ClassVar[ErrorCode]
    ERROR_CODE_TAKEN_UP: _ClassVar[ErrorCode]
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_INVALID_REQUEST: ErrorCode
ERROR_CODE_DUPLICATE_REQUEST: ErrorCode
ERROR_CODE_UNKNOWN_REQUEST: ErrorCode
ERROR_CODE_OVERLOADED: ErrorCode
ERROR_CODE_NO_WORKER: ErrorCode
ERROR_CODE_WORKER_LOST: ErrorCode
ERROR_CODE_GAP: ErrorCode
ERROR_CODE_ENGINE: ErrorCode
ERROR_CODE_UNRECOVERABLE: ErrorCode
ERROR_CODE_HANDOFF: ErrorCode
ERROR_CODE_ABORTED: ErrorCode
ERROR_CODE_DEADLINE: ErrorCode
ERROR_CODE_SLOW_CLIENT: ErrorCode
ERROR_CODE_INTERNAL: ErrorCode
ERROR_CODE_TAKEN_UP: ErrorCode

class Generate(_message.Message):
    __slots__ = ("request_key", "model", "text", "tokens", "sampling", "top_logprobs", "include_draft_logprobs", "deadline_ms", "handoff_address", "handoff_ticket", "handoff_server_key", "deadline_unix_ms", "owner")
    REQUEST_KEY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_DRAFT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_TICKET_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_SERVER_KEY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    request_key: int
    model: str
    text: TextPrompt
    tokens: TokenPrompt
    sampling: SamplingParameters
    top_logprobs: int
    include_draft_logprobs: bool
    deadline_ms: int
    handoff_address: str
    handoff_ticket: bytes
    handoff_server_key: bytes
    deadline_unix_ms: int
    owner: int
    def __init__(self, request_key: _Optional[int] = ..., model: _Optional[str] = ..., text: _Optional[_Union[TextPrompt, _Mapping]] = ..., tokens: _Optional[_Union[TokenPrompt, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParameters, _Mapping]] = ..., top_logprobs: _Optional[int] = ..., include_draft_logprobs: bool = ..., deadline_ms: _Optional[int] = ..., handoff_address: _Optional[str] = ..., handoff_ticket: _Optional[bytes] = ..., handoff_server_key: _Optional[bytes] = ..., deadline_unix_ms: _Optional[int] = ..., owner: _Optional[int] = ...) -> None: ...

class TextPrompt(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class TokenPrompt(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParameters(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_end_token")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_end_token: bool
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_end_token: bool = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_key",)
    REQUEST_KEY_FIELD_NUMBER: _ClassVar[int]
    request_key: int
    def __init__(self, request_key: _Optional[int] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("request_key", "worker_id", "epoch", "prompt_tokens", "deadline_unix_ms")
    REQUEST_KEY_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    request_key: int
    worker_id: str
    epoch: int
    prompt_tokens: int
    deadline_unix_ms: int
    def __init__(self, request_key: _Optional[int] = ..., worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., deadline_unix_ms: _Optional[int] = ...) -> None: ...

class RequestError(_message.Message):
    __slots__ = ("request_key", "code", "message", "emitted_tokens", "retry_after_ms")
    REQUEST_KEY_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    request_key: int
    code: ErrorCode
    message: str
    emitted_tokens: int
    retry_after_ms: int
    def __init__(self, request_key: _Optional[int] = ..., code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ..., emitted_tokens: _Optional[int] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class RequestEvent(_message.Message):
    __slots__ = ("sequence", "admitted", "error")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    admitted: Admitted
    error: RequestError
    def __init__(self, sequence: _Optional[int] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ..., error: _Optional[_Union[RequestError, _Mapping]] = ...) -> None: ...
