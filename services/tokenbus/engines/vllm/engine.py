"""VllmEngine: runs vLLM's EngineCore in this process, as vLLM's InprocClient does, without vLLM's front end."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from tokenbus.engines.admission import prompt_of
from tokenbus.engines.vllm.columns import NO_ROWS, Logprobs
from tokenbus.engines.vllm.compatibility import OF_SAMPLER, check_members, load_vllm
from tokenbus.engines.vllm.configuration import check_model, configured, tokenizer_of
from tokenbus.engines.vllm.control import ControlledCore
from tokenbus.engines.vllm.parameters import begin_only, sampling_arguments
from tokenbus.engines.vllm.processes import own_session, sleep_while_they_compute
from tokenbus.engines.vllm.requests import Request, Requests
from tokenbus.settings import Settings
from tokenbus.worker import EngineBrokenError, StepArrays
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TokenScoring

_USED_OF_CORE = ("scheduler", "step_fn", "batch_queue", "model_executor")
_DIED = "a process of vLLM has died"


class _Computed(NamedTuple):
    scheduled: Any
    indices: dict[str, int]
    logprobs: Logprobs
    prompts: Mapping[str, Any]
    """vLLM's LogprobsTensors of each prompt that the step completed."""
    outputs: Sequence[Any]


class VllmEngine(ControlledCore):
    """An engine for any model that vLLM supports.

    The thread that calls `step` must also create the engine, because OpenMP and CUDA bind to the creating thread.
    """

    def __init__(self, model: Path | None, arguments: Sequence[str] = (), settings: Settings | None = None) -> None:
        """Start vLLM. Raise ValueError for a bad option or version, RuntimeError or ImportError for other failures."""
        settings = settings or Settings()
        model = check_model(model)
        # vLLM must log to standard error, and reads this variable at its import.
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        vllm = load_vllm()
        self._refusals = (ValueError, vllm.VLLMValidationError)
        self._is_broken = False
        with ExitStack() as undone:  # a failure must release vLLM's processes and device memory
            try:
                config, adapters, has_token_scores = configured(vllm, model, arguments, settings)
                if has_token_scores:
                    load_vllm(OF_SAMPLER)
                with own_session(vllm.WorkerProc):
                    core = vllm.EngineCore(
                        config,
                        vllm.Executor.get_class(config),
                        log_stats=False,
                        executor_fail_callback=self._note_broken,
                    )
                undone.callback(core.shutdown)
                check_members(core, _USED_OF_CORE)
                check_members(core.scheduler, ("kv_cache_manager",))
                super().__init__(vllm, config, core, model)
                if has_token_scores:
                    self._core.collective_rpc(import_module("tokenbus.engines.vllm.sampler").use_token_scores)
                sleep_while_they_compute(self._core.model_executor)
                self._inputs = vllm.InputProcessor(config)
                check_members(self._inputs, ("tokenizer",))
                if self._inputs.tokenizer is not None:
                    check_members(self._inputs.tokenizer, ("encode", "max_chars_per_token"))
                self._tasks = self._core.get_supported_tasks()
                for adapter in adapters:
                    try:
                        self._load(adapter)
                    except Exception as error:
                        raise ValueError(f"--lora-modules: {adapter.name}: {_line(error)}") from error
            except self._refusals as error:
                raise ValueError(_line(error)) from error
            except Exception as error:
                raise RuntimeError(f"vLLM could not start: {type(error).__name__}: {_line(error)}") from error
            self.token_scores = frozenset(TokenScoring.DESCRIPTOR.fields_by_name if has_token_scores else ())
            self.dp_rank: int = config.parallel_config.data_parallel_index
            described = tokenizer_of(Path(str(config.model_config.tokenizer)), self._inputs.tokenizer)
            self.tokenizer_digest, self.tokenizer_probes = described
            # vLLM's core may have reduced the maximum context to the capacity of its KV cache.
            self.max_model_tokens: int = config.model_config.max_model_len
            self.vocabulary_size: int = config.model_config.get_vocab_size()
            self._defaults = config.model_config.get_diff_sampling_param()
            self._top_logprobs = settings.limits.max_top_k
            self._role = settings.worker.role
            self._requests = Requests(vllm, config)
            self._aborted: list[str] = []
            self._computed: list[_Computed] = []
            self._observe(self._core.scheduler)
            undone.pop_all()

    @property
    def kv_cache_usage(self) -> float:
        """Fill level of the KV cache, from 0 to 1."""
        return float(self._core.scheduler.kv_cache_manager.usage)

    @property
    def has_work(self) -> bool:
        if self._is_broken or self._aborted or self._core.batch_queue:
            return True
        # While vLLM is paused, `has_requests` does not count paused requests.
        return bool(self._core.scheduler.has_requests() or (self._requests and not self._is_paused))

    def admit(self, generate: Generate) -> int:
        name = f"{generate.request_id:016x}"
        if name in self._requests:
            raise ValueError(f"request_id: {generate.request_id} is in use already")
        given = sampling_arguments(
            generate,
            self._defaults,
            vocabulary_size=self.vocabulary_size,
            top_logprobs=self._top_logprobs,
            has_token_scores=bool(self.token_scores),
        )
        leaves = self._role == "prefill" and begin_only(given)
        sampling, vllm = generate.sampling, self._vllm
        adapter = self._adapters.get(sampling.lora_adapter)
        if adapter is None and sampling.lora_adapter:
            known = f"one of {', '.join(self._adapters)}" if self._adapters else "none, since none is loaded"
            raise ValueError(f"sampling.lora_adapter: {known}, got {sampling.lora_adapter!r}")
        prompt = prompt_of(generate, self.encode, self.vocabulary_size, self.max_model_tokens - 1)
        accepted = list(generate.continuation.token_ids)
        salt = self.salted(sampling.cache_salt, sampling.lora_adapter)
        try:
            if "structured_outputs" in given:
                given["structured_outputs"] = vllm.StructuredOutputsParams(**given["structured_outputs"])
            request = self._inputs.process_inputs(
                name,
                vllm.tokens_input(prompt + accepted, cache_salt=salt),
                vllm.SamplingParams(**given, skip_clone=True),  # a deep copy would take a third of this function's time
                supported_tasks=self._tasks,
                lora_request=adapter,
                priority=sampling.priority,
            )
            detokenizer = self._detokenizer(request, accepted, sampling.min_tokens) if sampling.stop else None
            self._core.add_request(*self._core.preprocess_add_request(request))
        except self._refusals as error:
            raise ValueError(_refusal(error)) from error
        top_k = generate.top_logprobs if generate.HasField("top_logprobs") else None
        self._requests.prompts.add(name, generate)
        request = Request(generate.request_id, top_k, tuple(sampling.stop), detokenizer, len(accepted), leaves)
        self._requests.add(name, request)
        return len(prompt)

    def abort(self, request_id: int) -> None:
        name = f"{request_id:016x}"
        if name in self._requests and name not in self._aborted:
            self._aborted.append(name)

    def step(self) -> Sequence[StepArrays]:
        """Let vLLM compute a step, and return the step's rows. While vLLM fills its batch queue, return nothing."""
        if self._is_broken:
            raise EngineBrokenError(_DIED)
        aborted, self._aborted = self._aborted, []
        self._core.abort_requests(aborted)
        last_rows = self._requests.abort(aborted)
        self._computed.clear()
        if self._core.batch_queue or self._core.scheduler.has_requests():
            self._compute()
        made = []
        for computed in self._computed:
            scores = self._requests.prompts.taken(computed.prompts)
            rows, stopped = self._requests.rows_of(computed.scheduled, computed.indices, computed.outputs)
            if stopped:
                self._core.abort_requests(stopped)
            if rows := last_rows + rows:
                arrays = self._requests.arrays(rows, computed.logprobs)
                arrays.prompt_scores, arrays.weight_version = scores, self.weight_version
                arrays.transfer_states = self._requests.taken_states()
                arrays.cached_prompts = [each for each in self._requests.cached_prompts if each[-1]]
                made.append(arrays)
            last_rows = NO_ROWS
        return [*made, self._requests.arrays(last_rows, None)] if last_rows else made

    def close(self) -> None:
        self._core.shutdown()

    def encode(self, text: str) -> list[int]:
        if self._inputs.tokenizer is None:
            raise ValueError("text.text: vLLM runs without a tokenizer here; send token ids")
        return list(self._inputs.tokenizer.encode(text))

    def _compute(self) -> None:
        try:
            _outputs, model_executed = self._core.step_fn()
            self._core.post_step(model_executed=model_executed)
        except Exception as error:
            # The requests' state is unknown, so all requests end. If a process of vLLM has died, the worker ends, too.
            # vLLM may wake this thread before it calls `_note_broken`, so `is_failed` is read, too.
            if self._is_broken or getattr(self._core.model_executor, "is_failed", False):
                raise EngineBrokenError(f"{_DIED}: {_line(error)}") from error
            raise

    def _observe(self, scheduler: Any) -> None:  # noqa: ANN401 - vLLM's Scheduler
        """Take each step's logprob arrays, before vLLM would convert the arrays into objects for each request."""
        update = scheduler.update_from_output

        def update_from_output(scheduled: Any, computed: Any) -> Any:  # noqa: ANN401 - as above
            logprobs, computed.logprobs = computed.logprobs, None
            prompts, computed.prompt_logprobs_dict = computed.prompt_logprobs_dict, {}
            outputs = update(scheduled, computed)
            mine = outputs[0].outputs if 0 in outputs else ()
            self._computed.append(_Computed(scheduled, computed.req_id_to_index, logprobs, prompts, mine))
            return outputs

        scheduler.update_from_output = update_from_output

    def _detokenizer(self, request: Any, accepted: list[int], min_tokens: int) -> Any:  # noqa: ANN401 - vLLM's own
        """Return the detector of stop strings. A stop string may begin in the accepted tokens of earlier turns."""
        if self._inputs.tokenizer is None:
            raise ValueError("sampling.stop: vLLM runs without a tokenizer here, so it finds no stop strings")
        if accepted:
            request, request.sampling_params = copy(request), copy(request.sampling_params)
            request.prompt_token_ids = request.prompt_token_ids[: -len(accepted)]
            request.sampling_params.min_tokens = min_tokens
        detokenizer = self._vllm.IncrementalDetokenizer.from_new_request(self._inputs.tokenizer, request)
        if accepted and detokenizer.update(accepted, False):  # noqa: FBT003 - vLLM's own order
            raise ValueError("continuation.token_ids: no token that ends the request, got a stop string")
        return detokenizer

    def _note_broken(self) -> None:
        """Record that a process of vLLM has died. vLLM calls this function on another thread."""
        self._is_broken = True


def _refusal(error: BaseException) -> str:
    """Return vLLM's reason in one line, prefixed with the sampling parameter if vLLM names one."""
    name = getattr(error, "parameter", None)
    if name not in SamplingParameters.DESCRIPTOR.fields_by_name:
        return _line(error)
    return f"sampling.{name}: {' '.join(str(error.args[0]).split())}"


def _line(error: BaseException) -> str:
    """Return an error's message in one line, because messages of pydantic have several lines."""
    return " ".join(str(error).split()) or type(error).__name__
