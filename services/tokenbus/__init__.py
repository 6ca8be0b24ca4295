"""Tokenbus: delivers every token of an LLM engine, with its logprobs, to the client that requested it.

    import tokenbus

    async with tokenbus.connect("tcp://127.0.0.1:5571") as client:
        async for token in client.generate("Once upon a time", max_tokens=8, top_logprobs=2, seed=1):
            print(token.id, token.logprob)

A client program begins with `connect`. An engine begins with `run_engine`. docs/api.md describes every public name.
Importing this package imports nothing else, because names are loaded when they are first used.
"""

import sys
from typing import TYPE_CHECKING

from tokenbus.on_use import loader

# Skip isort, which would write one statement for each name.
# isort: skip_file
if TYPE_CHECKING:
    from tokenbus.bus import AddressError as AddressError
    from tokenbus.client import (
        Client as Client,
        ControlError as ControlError,
        Generation as Generation,
        Operator as Operator,
        RequestEnd as RequestEnd,
        RequestParameters as RequestParameters,
        StepRows as StepRows,
        Stream as Stream,
        StructuredOutput as StructuredOutput,
        Token as Token,
        connect as connect,
    )
    from tokenbus.client.tokens import Turn as Turn
    from tokenbus.client.weight_spans import WeightSpan as WeightSpan
    from tokenbus.delivery import RequestFailedError as RequestFailedError, Step as Step
    from tokenbus.delivery.step import TokenExtras as TokenExtras
    from tokenbus.engines.base import BaseEngine as BaseEngine
    from tokenbus.plugins import PluginError as PluginError, load_tokenizer as load_tokenizer
    from tokenbus.processor import Processor as Processor
    from tokenbus.recordings.durable_log.reader import read_log as read_log
    from tokenbus.recordings.durable_log.stream import LogError as LogError
    from tokenbus.recordings.items import (
        RecordingError as RecordingError,
        StreamItem as StreamItem,
        read_recording as read_recording,
    )
    from tokenbus.recordings.sessions import Session as Session, read_sessions as read_sessions
    from tokenbus.settings import Settings as Settings, SettingsError as SettingsError
    from tokenbus.worker import (
        Engine as Engine,
        EngineBrokenError as EngineBrokenError,
        EngineStepError as EngineStepError,
        NotRunningError as NotRunningError,
        Publisher as Publisher,
        PublishError as PublishError,
        RetentionFullError as RetentionFullError,
        StepArrays as StepArrays,
        StepAssembler as StepAssembler,
        WouldWaitError as WouldWaitError,
    )
    from tokenbus.worker.run import run_engine as run_engine
    from tokenbus_contracts import (
        BatchHeader as BatchHeader,
        BatchKind as BatchKind,
        ContractError as ContractError,
        Extra as Extra,
        Extras as Extras,
        Limits as Limits,
        LogprobBatch as LogprobBatch,
        PromptScores as PromptScores,
        Row as Row,
        RowStatus as RowStatus,
        Rule as Rule,
        Scoring as Scoring,
        SpeculativeMethod as SpeculativeMethod,
        StepPhase as StepPhase,
        ValueKind as ValueKind,
        decode as decode,
        encode as encode,
    )
    from tokenbus_contracts.generated.request_pb2 import Generate as Generate
    from tokenbus_gpu_ops import token_logprobs as token_logprobs

if sys.version_info < (3, 11):
    from tokenbus.python_version import refuse_what_needs_3_11

    refuse_what_needs_3_11()

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
    "tokenbus.client.tokens": "Turn",
    "tokenbus.client.weight_spans": "WeightSpan",
    "tokenbus.recordings.durable_log.reader": "read_log",
    "tokenbus.recordings.durable_log.stream": "LogError",
    "tokenbus.recordings.items": "RecordingError StreamItem read_recording",
    "tokenbus.recordings.sessions": "Session read_sessions",
    "tokenbus.engines.base": "BaseEngine",
    "tokenbus.plugins": "PluginError load_tokenizer",
    "tokenbus.processor": "Processor",
    "tokenbus.settings": "Settings SettingsError",
    "tokenbus.worker": "Engine EngineBrokenError EngineStepError NotRunningError PublishError Publisher "
    "RetentionFullError StepArrays StepAssembler WouldWaitError",
    "tokenbus.worker.run": "run_engine",
}
__all__ = [name for defined in _HOMES.values() for name in defined.split()]
__getattr__ = loader(__name__, _HOMES, globals())


def __dir__() -> list[str]:
    return sorted(__all__)
