"""Tokenbus: every token that an LLM engine emits, with its logprobs, from the engine to the client that asked for it.

    import tokenbus

    async with tokenbus.connect("tcp://127.0.0.1:5571") as client:
        async for token in client.generate("Once upon a time", max_tokens=8, top_logprobs=2, seed=1):
            print(token.id, token.logprob)

A client begins with `connect`, an engine with `run_engine`; docs/api.md has every name. Importing this package imports
nothing else: a name is loaded when it is used first, and no GPU framework before an engine needs one.
"""

import sys
from typing import TYPE_CHECKING

from tokenbus.on_use import loader

if TYPE_CHECKING:
    from tokenbus.bus import AddressError
    from tokenbus.client import (
        Client,
        ControlError,
        Generation,
        Operator,
        RequestEnd,
        RequestParameters,
        StepRows,
        Stream,
        StructuredOutput,
        Token,
        connect,
    )
    from tokenbus.client.weight_spans import WeightSpan
    from tokenbus.delivery import RequestFailedError, Step
    from tokenbus.delivery.step import TokenExtras
    from tokenbus.processor import Processor
    from tokenbus.recordings.durable_log.reader import read_log
    from tokenbus.recordings.durable_log.stream import LogError
    from tokenbus.recordings.items import RecordingError, StreamItem, read_recording
    from tokenbus.settings import Settings, SettingsError
    from tokenbus.worker import (
        Engine,
        EngineBrokenError,
        EngineStepError,
        NotRunningError,
        Publisher,
        PublishError,
        RetentionFullError,
        StepArrays,
        StepAssembler,
        WouldWaitError,
    )
    from tokenbus.worker.run import run_engine
    from tokenbus_contracts import (
        BatchHeader,
        BatchKind,
        ContractError,
        Extra,
        Extras,
        Limits,
        LogprobBatch,
        PromptScores,
        Row,
        RowStatus,
        Rule,
        Scoring,
        SpeculativeMethod,
        StepPhase,
        ValueKind,
        decode,
        encode,
    )
    from tokenbus_contracts.generated.request_pb2 import Generate
    from tokenbus_gpu_ops import token_logprobs

if sys.version_info < (3, 11):
    from tokenbus.python_version import refuse_what_needs_3_11

    refuse_what_needs_3_11()

__all__ = [
    "AddressError",
    "BatchHeader",
    "BatchKind",
    "Client",
    "ContractError",
    "ControlError",
    "Engine",
    "EngineBrokenError",
    "EngineStepError",
    "Extra",
    "Extras",
    "Generate",
    "Generation",
    "Limits",
    "LogError",
    "LogprobBatch",
    "NotRunningError",
    "Operator",
    "Processor",
    "PromptScores",
    "PublishError",
    "Publisher",
    "RecordingError",
    "RequestEnd",
    "RequestFailedError",
    "RequestParameters",
    "RetentionFullError",
    "Row",
    "RowStatus",
    "Rule",
    "Scoring",
    "Settings",
    "SettingsError",
    "SpeculativeMethod",
    "Step",
    "StepArrays",
    "StepAssembler",
    "StepPhase",
    "StepRows",
    "Stream",
    "StreamItem",
    "StructuredOutput",
    "Token",
    "TokenExtras",
    "ValueKind",
    "WeightSpan",
    "WouldWaitError",
    "connect",
    "decode",
    "encode",
    "read_log",
    "read_recording",
    "run_engine",
    "token_logprobs",
]

_HOMES = {
    "tokenbus_contracts": "BatchHeader BatchKind ContractError Extra Extras Limits LogprobBatch PromptScores Row "
    "RowStatus Rule Scoring SpeculativeMethod StepPhase ValueKind decode encode",
    "tokenbus_contracts.generated.request_pb2": "Generate",
    "tokenbus_gpu_ops": "token_logprobs",
    "tokenbus.bus": "AddressError",
    "tokenbus.client": "Client ControlError Generation Operator RequestEnd RequestParameters StepRows Stream "
    "StructuredOutput Token connect",
    "tokenbus.delivery": "RequestFailedError Step",
    "tokenbus.delivery.step": "TokenExtras",
    "tokenbus.client.weight_spans": "WeightSpan",
    "tokenbus.recordings.durable_log.reader": "read_log",
    "tokenbus.recordings.durable_log.stream": "LogError",
    "tokenbus.recordings.items": "RecordingError StreamItem read_recording",
    "tokenbus.processor": "Processor",
    "tokenbus.settings": "Settings SettingsError",
    "tokenbus.worker": "Engine EngineBrokenError EngineStepError NotRunningError PublishError Publisher "
    "RetentionFullError StepArrays StepAssembler WouldWaitError",
    "tokenbus.worker.run": "run_engine",
}
__getattr__ = loader(__name__, _HOMES, globals())


def __dir__() -> list[str]:
    return sorted(__all__)
