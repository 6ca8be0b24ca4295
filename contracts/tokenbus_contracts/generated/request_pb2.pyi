# Generated from proto/tokenbus/v1 by `make proto`. Do not edit: CI refuses a stale or edited copy.
from tokenbus_contracts.generated import bounds_pb2 as _bounds_pb2
from tokenbus_contracts.generated import control_pb2 as _control_pb2
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
    ERROR_CODE_TAKEN_UP: _ClassVar[ErrorCode]
    ERROR_CODE_ABORTED: _ClassVar[ErrorCode]
    ERROR_CODE_DEADLINE: _ClassVar[ErrorCode]
    ERROR_CODE_SLOW_CLIENT: _ClassVar[ErrorCode]
    ERROR_CODE_INTERNAL: _ClassVar[ErrorCode]

class ContinuationPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTINUATION_POLICY_UNSPECIFIED: _ClassVar[ContinuationPolicy]
    CONTINUATION_POLICY_OFF: _ClassVar[ContinuationPolicy]
    CONTINUATION_POLICY_SAME_WEIGHTS: _ClassVar[ContinuationPolicy]
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
ERROR_CODE_TAKEN_UP: ErrorCode
ERROR_CODE_ABORTED: ErrorCode
ERROR_CODE_DEADLINE: ErrorCode
ERROR_CODE_SLOW_CLIENT: ErrorCode
ERROR_CODE_INTERNAL: ErrorCode
CONTINUATION_POLICY_UNSPECIFIED: ContinuationPolicy
CONTINUATION_POLICY_OFF: ContinuationPolicy
CONTINUATION_POLICY_SAME_WEIGHTS: ContinuationPolicy

class Generate(_message.Message):
    __slots__ = ("request_id", "model", "text", "tokens", "sampling", "top_logprobs", "include_draft_logprobs", "deadline_ms", "continuation", "drawn_seed", "continuation_policy", "deadline_unix_ms", "owner", "tokenizer_digest", "first_request_id", "prompt_scoring", "token_scoring", "session", "parent", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_DRAFT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    DRAWN_SEED_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_POLICY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORING_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SCORING_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    model: str
    text: TextPrompt
    tokens: TokenPrompt
    sampling: SamplingParameters
    top_logprobs: int
    include_draft_logprobs: bool
    deadline_ms: int
    continuation: Continuation
    drawn_seed: int
    continuation_policy: ContinuationPolicy
    deadline_unix_ms: int
    owner: int
    tokenizer_digest: int
    first_request_id: int
    prompt_scoring: PromptScoring
    token_scoring: TokenScoring
    session: str
    parent: int
    tenant: int
    def __init__(self, request_id: _Optional[int] = ..., model: _Optional[str] = ..., text: _Optional[_Union[TextPrompt, _Mapping]] = ..., tokens: _Optional[_Union[TokenPrompt, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParameters, _Mapping]] = ..., top_logprobs: _Optional[int] = ..., include_draft_logprobs: bool = ..., deadline_ms: _Optional[int] = ..., continuation: _Optional[_Union[Continuation, _Mapping]] = ..., drawn_seed: _Optional[int] = ..., continuation_policy: _Optional[_Union[ContinuationPolicy, str]] = ..., deadline_unix_ms: _Optional[int] = ..., owner: _Optional[int] = ..., tokenizer_digest: _Optional[int] = ..., first_request_id: _Optional[int] = ..., prompt_scoring: _Optional[_Union[PromptScoring, _Mapping]] = ..., token_scoring: _Optional[_Union[TokenScoring, _Mapping]] = ..., session: _Optional[str] = ..., parent: _Optional[int] = ..., tenant: _Optional[int] = ...) -> None: ...

class Continuation(_message.Message):
    __slots__ = ("token_ids", "turn", "reason", "transfer_state", "weight_version")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_STATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    turn: int
    reason: ErrorCode
    transfer_state: bytes
    weight_version: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., turn: _Optional[int] = ..., reason: _Optional[_Union[ErrorCode, str]] = ..., transfer_state: _Optional[bytes] = ..., weight_version: _Optional[int] = ...) -> None: ...

class TokenScoring(_message.Message):
    __slots__ = ("other_logprobs", "entropies", "token_ids", "mask_bound")
    OTHER_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENTROPIES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MASK_BOUND_FIELD_NUMBER: _ClassVar[int]
    other_logprobs: bool
    entropies: bool
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    mask_bound: int
    def __init__(self, other_logprobs: bool = ..., entropies: bool = ..., token_ids: _Optional[_Iterable[int]] = ..., mask_bound: _Optional[int] = ...) -> None: ...

class PromptScoring(_message.Message):
    __slots__ = ("top_logprobs", "token_ids", "first_position", "without_generation")
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    top_logprobs: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    first_position: int
    without_generation: bool
    def __init__(self, top_logprobs: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., first_position: _Optional[int] = ..., without_generation: bool = ...) -> None: ...

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
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_end_token", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "bad_words", "allowed_token_ids", "include_stop_string", "include_special_tokens", "structured_output", "lora_adapter", "priority", "cache_salt", "engine_arguments")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LORA_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_end_token: bool
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[TokenBias]
    min_tokens: int
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop_string: bool
    include_special_tokens: bool
    structured_output: StructuredOutput
    lora_adapter: str
    priority: int
    cache_salt: str
    engine_arguments: str
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_end_token: bool = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[TokenBias, _Mapping]]] = ..., min_tokens: _Optional[int] = ..., bad_words: _Optional[_Iterable[str]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., include_stop_string: bool = ..., include_special_tokens: bool = ..., structured_output: _Optional[_Union[StructuredOutput, _Mapping]] = ..., lora_adapter: _Optional[str] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., engine_arguments: _Optional[str] = ...) -> None: ...

class TokenBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    json_schema: JsonSchema
    json_object: JsonObject
    regex: Regex
    choice: Choice
    grammar: Grammar
    structural_tag: StructuralTag
    def __init__(self, json_schema: _Optional[_Union[JsonSchema, _Mapping]] = ..., json_object: _Optional[_Union[JsonObject, _Mapping]] = ..., regex: _Optional[_Union[Regex, _Mapping]] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., structural_tag: _Optional[_Union[StructuralTag, _Mapping]] = ...) -> None: ...

class JsonSchema(_message.Message):
    __slots__ = ("schema",)
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    schema: str
    def __init__(self, schema: _Optional[str] = ...) -> None: ...

class JsonObject(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Regex(_message.Message):
    __slots__ = ("pattern",)
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    pattern: str
    def __init__(self, pattern: _Optional[str] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class StructuralTag(_message.Message):
    __slots__ = ("tag",)
    TAG_FIELD_NUMBER: _ClassVar[int]
    tag: str
    def __init__(self, tag: _Optional[str] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    def __init__(self, request_id: _Optional[int] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("request_id", "worker_id", "epoch", "prompt_tokens", "deadline_unix_ms", "cached_tokens", "first_request_id", "turn", "first_position", "reason", "weight_version")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    worker_id: str
    epoch: int
    prompt_tokens: int
    deadline_unix_ms: int
    cached_tokens: int
    first_request_id: int
    turn: int
    first_position: int
    reason: ErrorCode
    weight_version: int
    def __init__(self, request_id: _Optional[int] = ..., worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., deadline_unix_ms: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., first_request_id: _Optional[int] = ..., turn: _Optional[int] = ..., first_position: _Optional[int] = ..., reason: _Optional[_Union[ErrorCode, str]] = ..., weight_version: _Optional[int] = ...) -> None: ...

class RequestError(_message.Message):
    __slots__ = ("request_id", "code", "message", "emitted_tokens", "retry_after_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    code: ErrorCode
    message: str
    emitted_tokens: int
    retry_after_ms: int
    def __init__(self, request_id: _Optional[int] = ..., code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ..., emitted_tokens: _Optional[int] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class RequestEvent(_message.Message):
    __slots__ = ("sequence", "admitted", "error", "prompt_scores", "control_answer", "prefilled", "session_prompt", "routed_experts")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORES_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ANSWER_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    SESSION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    admitted: Admitted
    error: RequestError
    prompt_scores: PromptScoresChunk
    control_answer: _control_pb2.ControlAnswer
    prefilled: Prefilled
    session_prompt: SessionPrompt
    routed_experts: RoutedExperts
    def __init__(self, sequence: _Optional[int] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ..., error: _Optional[_Union[RequestError, _Mapping]] = ..., prompt_scores: _Optional[_Union[PromptScoresChunk, _Mapping]] = ..., control_answer: _Optional[_Union[_control_pb2.ControlAnswer, _Mapping]] = ..., prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., session_prompt: _Optional[_Union[SessionPrompt, _Mapping]] = ..., routed_experts: _Optional[_Union[RoutedExperts, _Mapping]] = ...) -> None: ...

class RoutedExperts(_message.Message):
    __slots__ = ("request_id", "file", "offset", "length", "dtype", "shape", "position", "digest", "missing")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    file: str
    offset: int
    length: int
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    position: int
    digest: bytes
    missing: str
    def __init__(self, request_id: _Optional[int] = ..., file: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., position: _Optional[int] = ..., digest: _Optional[bytes] = ..., missing: _Optional[str] = ...) -> None: ...

class SessionPrompt(_message.Message):
    __slots__ = ("request_id", "session", "parent", "owner", "tenant", "position", "prompt_tokens", "token_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    session: str
    parent: int
    owner: int
    tenant: int
    position: int
    prompt_tokens: int
    token_ids: bytes
    def __init__(self, request_id: _Optional[int] = ..., session: _Optional[str] = ..., parent: _Optional[int] = ..., owner: _Optional[int] = ..., tenant: _Optional[int] = ..., position: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("request_id", "transfer_state")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_STATE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    transfer_state: bytes
    def __init__(self, request_id: _Optional[int] = ..., transfer_state: _Optional[bytes] = ...) -> None: ...

class PromptScoresChunk(_message.Message):
    __slots__ = ("request_id", "position", "prompt_tokens", "token_ids", "logprobs", "ranks", "alternatives", "alternative_token_ids", "alternative_logprobs", "alternatives_are_named")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_ARE_NAMED_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    position: int
    prompt_tokens: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    alternatives: int
    alternative_token_ids: bytes
    alternative_logprobs: bytes
    alternatives_are_named: bool
    def __init__(self, request_id: _Optional[int] = ..., position: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., alternatives: _Optional[int] = ..., alternative_token_ids: _Optional[bytes] = ..., alternative_logprobs: _Optional[bytes] = ..., alternatives_are_named: bool = ...) -> None: ...
