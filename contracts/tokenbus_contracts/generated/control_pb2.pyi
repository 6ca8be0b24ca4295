# Generated from proto/tokenbus/v1 by `make proto`. Do not edit: CI refuses a stale or edited copy.
from tokenbus_contracts.generated import bounds_pb2 as _bounds_pb2
from tokenbus_contracts.generated import logprob_batch_pb2 as _logprob_batch_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]
    PAUSE_MODE_WAIT: _ClassVar[PauseMode]
    PAUSE_MODE_KEEP: _ClassVar[PauseMode]

class WeightTransferStage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHT_TRANSFER_STAGE_UNSPECIFIED: _ClassVar[WeightTransferStage]
    WEIGHT_TRANSFER_STAGE_INIT: _ClassVar[WeightTransferStage]
    WEIGHT_TRANSFER_STAGE_START: _ClassVar[WeightTransferStage]
    WEIGHT_TRANSFER_STAGE_UPDATE: _ClassVar[WeightTransferStage]
    WEIGHT_TRANSFER_STAGE_FINISH: _ClassVar[WeightTransferStage]
    WEIGHT_TRANSFER_STAGE_SHUTDOWN: _ClassVar[WeightTransferStage]
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_ABORT: PauseMode
PAUSE_MODE_WAIT: PauseMode
PAUSE_MODE_KEEP: PauseMode
WEIGHT_TRANSFER_STAGE_UNSPECIFIED: WeightTransferStage
WEIGHT_TRANSFER_STAGE_INIT: WeightTransferStage
WEIGHT_TRANSFER_STAGE_START: WeightTransferStage
WEIGHT_TRANSFER_STAGE_UPDATE: WeightTransferStage
WEIGHT_TRANSFER_STAGE_FINISH: WeightTransferStage
WEIGHT_TRANSFER_STAGE_SHUTDOWN: WeightTransferStage

class Control(_message.Message):
    __slots__ = ("control_key", "worker_id", "client", "describe", "pause", "resume", "load_weights", "transfer_weights", "set_weight_version", "sleep", "wake", "reset_prefix_cache", "load_adapter", "unload_adapter", "collective_rpc")
    CONTROL_KEY_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    DESCRIBE_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    LOAD_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SET_WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SLEEP_FIELD_NUMBER: _ClassVar[int]
    WAKE_FIELD_NUMBER: _ClassVar[int]
    RESET_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_RPC_FIELD_NUMBER: _ClassVar[int]
    control_key: int
    worker_id: str
    client: str
    describe: DescribeEngine
    pause: PauseEngine
    resume: ResumeEngine
    load_weights: LoadWeights
    transfer_weights: TransferWeights
    set_weight_version: SetWeightVersion
    sleep: SleepEngine
    wake: WakeEngine
    reset_prefix_cache: ResetPrefixCache
    load_adapter: LoadAdapter
    unload_adapter: UnloadAdapter
    collective_rpc: CollectiveRpc
    def __init__(self, control_key: _Optional[int] = ..., worker_id: _Optional[str] = ..., client: _Optional[str] = ..., describe: _Optional[_Union[DescribeEngine, _Mapping]] = ..., pause: _Optional[_Union[PauseEngine, _Mapping]] = ..., resume: _Optional[_Union[ResumeEngine, _Mapping]] = ..., load_weights: _Optional[_Union[LoadWeights, _Mapping]] = ..., transfer_weights: _Optional[_Union[TransferWeights, _Mapping]] = ..., set_weight_version: _Optional[_Union[SetWeightVersion, _Mapping]] = ..., sleep: _Optional[_Union[SleepEngine, _Mapping]] = ..., wake: _Optional[_Union[WakeEngine, _Mapping]] = ..., reset_prefix_cache: _Optional[_Union[ResetPrefixCache, _Mapping]] = ..., load_adapter: _Optional[_Union[LoadAdapter, _Mapping]] = ..., unload_adapter: _Optional[_Union[UnloadAdapter, _Mapping]] = ..., collective_rpc: _Optional[_Union[CollectiveRpc, _Mapping]] = ...) -> None: ...

class DescribeEngine(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseEngine(_message.Message):
    __slots__ = ("mode", "lease_ms")
    MODE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    mode: PauseMode
    lease_ms: int
    def __init__(self, mode: _Optional[_Union[PauseMode, str]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class ResumeEngine(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadWeights(_message.Message):
    __slots__ = ("folder", "weight_version")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    folder: str
    weight_version: int
    def __init__(self, folder: _Optional[str] = ..., weight_version: _Optional[int] = ...) -> None: ...

class TransferWeights(_message.Message):
    __slots__ = ("stage", "arguments", "weight_version")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    stage: WeightTransferStage
    arguments: str
    weight_version: int
    def __init__(self, stage: _Optional[_Union[WeightTransferStage, str]] = ..., arguments: _Optional[str] = ..., weight_version: _Optional[int] = ...) -> None: ...

class SetWeightVersion(_message.Message):
    __slots__ = ("weight_version",)
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    weight_version: int
    def __init__(self, weight_version: _Optional[int] = ...) -> None: ...

class SleepEngine(_message.Message):
    __slots__ = ("level", "mode")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    level: int
    mode: PauseMode
    def __init__(self, level: _Optional[int] = ..., mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class WakeEngine(_message.Message):
    __slots__ = ("tags",)
    TAGS_FIELD_NUMBER: _ClassVar[int]
    tags: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tags: _Optional[_Iterable[str]] = ...) -> None: ...

class ResetPrefixCache(_message.Message):
    __slots__ = ("also_running",)
    ALSO_RUNNING_FIELD_NUMBER: _ClassVar[int]
    also_running: bool
    def __init__(self, also_running: bool = ...) -> None: ...

class LoadAdapter(_message.Message):
    __slots__ = ("name", "folder", "replace")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    folder: str
    replace: bool
    def __init__(self, name: _Optional[str] = ..., folder: _Optional[str] = ..., replace: bool = ...) -> None: ...

class UnloadAdapter(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class CollectiveRpc(_message.Message):
    __slots__ = ("method", "args", "kwargs", "timeout_ms")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    KWARGS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    method: str
    args: str
    kwargs: str
    timeout_ms: int
    def __init__(self, method: _Optional[str] = ..., args: _Optional[str] = ..., kwargs: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class ControlAnswer(_message.Message):
    __slots__ = ("control_key", "error", "state", "results")
    CONTROL_KEY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    control_key: int
    error: str
    state: EngineState
    results: str
    def __init__(self, control_key: _Optional[int] = ..., error: _Optional[str] = ..., state: _Optional[_Union[EngineState, _Mapping]] = ..., results: _Optional[str] = ...) -> None: ...

class EngineState(_message.Message):
    __slots__ = ("weight_version", "is_paused", "paused_since_unix_ms", "paused_by", "is_sleeping", "weights_are_damaged", "highest_weight_version", "world_size", "dtype", "value_kind", "weight_transfer", "max_adapters", "max_adapter_rank", "lora_adapters")
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_BY_FIELD_NUMBER: _ClassVar[int]
    IS_SLEEPING_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ARE_DAMAGED_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_KIND_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTER_RANK_FIELD_NUMBER: _ClassVar[int]
    LORA_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    weight_version: int
    is_paused: bool
    paused_since_unix_ms: int
    paused_by: str
    is_sleeping: bool
    weights_are_damaged: bool
    highest_weight_version: int
    world_size: int
    dtype: str
    value_kind: _logprob_batch_pb2.ValueKind
    weight_transfer: str
    max_adapters: int
    max_adapter_rank: int
    lora_adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, weight_version: _Optional[int] = ..., is_paused: bool = ..., paused_since_unix_ms: _Optional[int] = ..., paused_by: _Optional[str] = ..., is_sleeping: bool = ..., weights_are_damaged: bool = ..., highest_weight_version: _Optional[int] = ..., world_size: _Optional[int] = ..., dtype: _Optional[str] = ..., value_kind: _Optional[_Union[_logprob_batch_pb2.ValueKind, str]] = ..., weight_transfer: _Optional[str] = ..., max_adapters: _Optional[int] = ..., max_adapter_rank: _Optional[int] = ..., lora_adapters: _Optional[_Iterable[str]] = ...) -> None: ...
