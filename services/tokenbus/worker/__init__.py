"""The worker: runs an engine, and publishes its steps."""

from tokenbus.worker.assembler import StepAssembler
from tokenbus.worker.engine import Engine, EngineBrokenError, EngineKind, EngineStepError, engine_kind
from tokenbus.worker.errors import NotRunningError, PublishError, RetentionFullError, WouldWaitError
from tokenbus.worker.publisher import Publisher
from tokenbus.worker.step import StepArrays

__all__ = [
    "Engine",
    "EngineBrokenError",
    "EngineKind",
    "EngineStepError",
    "NotRunningError",
    "PublishError",
    "Publisher",
    "RetentionFullError",
    "StepArrays",
    "StepAssembler",
    "WouldWaitError",
    "engine_kind",
]
