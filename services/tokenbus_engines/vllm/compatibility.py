"""Compatibility: all that is used of vLLM, imported in one place, and checked against how it is used.

vLLM has no public interface for an engine core in one's own process, and each version moves something. What is called
here is the same in all versions of the supported range; one outside it, or one in which a call has changed, is refused
in one line when the engine is made, and not at the first request.
"""

import inspect
from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

from tokenbus_engines.vllm.parameters import SAMPLING_ARGUMENTS

OLDEST, NEWEST = (0, 26), (0, 33)
"""The supported versions, both included, by their first two numbers."""
_RANGE = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


class VersionError(ValueError):
    """A version of vLLM that cannot be used: which, and what has changed in it."""


class Call(NamedTuple):
    """A call of vLLM's: where it is, and the arguments that it is given."""

    module: str
    name: str
    """Within the module, with a dot for a method, whose first argument is the object."""
    positional: int = 0
    keywords: tuple[str, ...] = ()


class Members(NamedTuple):
    """Members of a class of vLLM's: its fields, or the names of an enumeration."""

    module: str
    name: str
    members: tuple[str, ...]


_CORE, _ENGINE, _OUTPUTS = "vllm.v1.engine.core", "vllm.v1.engine", "vllm.v1.outputs"
CALLS = (
    Call("vllm.engine.arg_utils", "EngineArgs.add_cli_args", 1),
    Call("vllm.engine.arg_utils", "EngineArgs.from_cli_args", 1),
    Call("vllm.engine.arg_utils", "EngineArgs.create_engine_config", 2),
    Call("vllm.utils.argparse_utils", "FlexibleArgumentParser", 0, ("prog",)),
    Call("vllm.usage.usage_lib", "UsageContext", 1),
    Call("vllm.v1.executor", "Executor.get_class", 1),
    Call("vllm.v1.executor.multiproc_executor", "WorkerProc.worker_main"),
    Call(_CORE, "EngineCore", 2, ("log_stats", "executor_fail_callback")),
    Call(_CORE, "EngineCore.get_supported_tasks", 1),
    Call(_CORE, "EngineCore.preprocess_add_request", 2),
    Call(_CORE, "EngineCore.add_request", 3),
    Call(_CORE, "EngineCore.step", 1),
    Call(_CORE, "EngineCore.step_with_batch_queue", 1),
    Call(_CORE, "EngineCore.post_step", 1, ("model_executed",)),
    Call(_CORE, "EngineCore.abort_requests", 2),
    Call(_CORE, "EngineCore.shutdown", 1),
    Call("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output", 3),
    Call("vllm.v1.core.sched.scheduler", "Scheduler.has_requests", 1),
    Call("vllm.v1.engine.input_processor", "InputProcessor", 1),
    Call(
        "vllm.v1.engine.input_processor",
        "InputProcessor.process_inputs",
        4,
        ("supported_tasks", "lora_request", "priority"),
    ),
    Call("vllm.v1.engine.detokenizer", "IncrementalDetokenizer.from_new_request", 2),
    Call("vllm.v1.engine.detokenizer", "IncrementalDetokenizer.update", 3),
    Call(_CORE, "EngineCore.add_lora", 2),
    Call("vllm.lora.request", "LoRARequest", 0, ("lora_name", "lora_int_id", "lora_path")),
    Call("vllm.inputs.engine", "tokens_input", 1, ("cache_salt",)),
    Call("vllm.sampling_params", "StructuredOutputsParams", 0, ("json", "json_object", "regex", "choice", "grammar")),
    Call("vllm.sampling_params", "SamplingParams", 0, SAMPLING_ARGUMENTS),
    Call("vllm.config", "ModelConfig.get_vocab_size", 1),
    Call("vllm.config", "ModelConfig.get_diff_sampling_param", 1),
)
MEMBERS = (
    Members(
        _ENGINE, "EngineCoreOutput", ("request_id", "new_token_ids", "finish_reason", "stop_reason", "new_logprobs")
    ),
    Members(_ENGINE, "EngineCoreOutputs", ("outputs",)),
    Members(_ENGINE, "FinishReason", ("STOP", "LENGTH", "ABORT", "ERROR", "REPETITION")),
    Members(
        _OUTPUTS,
        "LogprobsLists",
        ("logprob_token_ids", "logprobs", "sampled_token_ranks", "cu_num_generated_tokens"),
    ),
    Members(_OUTPUTS, "ModelRunnerOutput", ("logprobs", "req_id_to_index")),
    Members(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        (
            "num_scheduled_tokens",
            "scheduled_spec_decode_tokens",
            "preempted_req_ids",
            "num_invalid_spec_tokens",
            "scheduled_new_reqs",
            "finished_req_ids",
        ),
    ),
    Members("vllm.config", "ParallelConfig", ("data_parallel_index", "data_parallel_rank_local", "world_size")),
    Members("vllm.config", "ModelConfig", ("is_moe",)),
    Members("vllm.exceptions", "VLLMValidationError", ("parameter", "value")),
)
_SHARED = ("vllm.config", "vllm.v1.core.sched.scheduler", "vllm.v1.engine.detokenizer")
OF_ENGINE: tuple[Call | Members, ...] = (*CALLS, *MEMBERS)
"""What the engine uses."""
OF_SCHEDULER: tuple[Call | Members, ...] = (
    *(each for each in CALLS if each.module in _SHARED),
    Call("vllm.v1.core.sched.scheduler", "Scheduler.schedule", 1),
    Call("vllm.v1.core.sched.scheduler", "Scheduler.shutdown", 1),
    Call("vllm.config", "SchedulerConfig.get_scheduler_cls", 1),
    *MEMBERS,
    Members("vllm.v1.core.sched.output", "NewRequestData", ("req_id", "sampling_params")),
    Members(
        "vllm.sampling_params",
        "SamplingParams",
        ("num_logprobs", "logprobs", "logprob_token_ids", "stop", "extra_args"),
    ),
)
"""What the scheduler of a vLLM that is deployed already uses."""


def load_vllm(used: Sequence[Call | Members] = OF_ENGINE) -> SimpleNamespace:
    """Import what is used of vLLM, and return it by its names.

    Raises ImportError where it is not installed, and VersionError where it is one that cannot be used.
    """
    try:
        version = str(import_module("vllm").__version__)
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ImportError("vLLM is not installed: pip install 'tokenbus[vllm]'", name="vllm") from None
    check(version, used)
    names = {each.name.split(".")[0]: each.module for each in used}
    return SimpleNamespace(**{name: getattr(import_module(module), name) for name, module in names.items()})


def check(version: str, used: Sequence[Call | Members] = OF_ENGINE) -> None:
    """Raise a VersionError for a version out of the range, or in which a call has changed, with the first of them."""
    change = next(filter(None, map(_change, used)), None)
    if not _is_supported(version):
        what = change or "no call that is used has changed, but it was never run"
        raise VersionError(f"vLLM: a version from {_RANGE}, got {version}: {what}")
    if change:
        raise VersionError(f"vLLM {version} is not as expected of {_RANGE}: {change}")


def check_members(owner: object, names: tuple[str, ...]) -> None:
    """Raise a VersionError if an object of vLLM's lacks what is used of it."""
    for name in names:
        if not hasattr(owner, name):
            raise VersionError(f"vLLM: {type(owner).__name__}.{name} is not there")


def _is_supported(version: str) -> bool:
    numbers = version.split(".")[:2]
    return len(numbers) == len(OLDEST) and all(map(str.isdecimal, numbers)) and _within(*map(int, numbers))


def _within(*numbers: int) -> bool:
    return OLDEST <= numbers <= NEWEST


def _change(used: Call | Members) -> str:
    """Return what has changed in a call or a class, or nothing."""
    try:
        found: Any = import_module(used.module)
        for name in used.name.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        return f"{used.module}.{used.name} is not there: {error}"
    if isinstance(used, Members):
        lacking = [name for name in used.members if not _has_member(found, name)]
        return f"{used.module}.{used.name} has no {', '.join(lacking)}" if lacking else ""
    try:
        inspect.signature(found).bind(*[None] * used.positional, **dict.fromkeys(used.keywords))
    except TypeError as error:
        return f"{used.module}.{used.name} has changed: {error}"
    except ValueError:  # no signature can be had, as of a class in C
        return ""
    return ""


def _has_member(owner: type, name: str) -> bool:
    if any(name in vars(each).get("__annotations__", {}) for each in owner.__mro__):
        return True
    return hasattr(owner, name) or name in inspect.signature(owner).parameters
