"""The worker: what an engine embeds to publish what it emits."""

from tokenbus_services.worker.assembler import StepAssembler
from tokenbus_services.worker.engine import (
    Engine,
    EngineBrokenError,
    EngineKind,
    EngineStepError,
    engine_kind,
)
from tokenbus_services.worker.errors import NotRunningError, PublishError, RetentionFullError, WouldWaitError
from tokenbus_services.worker.publisher import Publisher
from tokenbus_services.worker.step import StepArrays

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
