"""ControlledCore: operator commands to a running vLLM, for pauses, weights, memory and adapters."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenbus.engines.vllm.adapters import Adapter, checked
from tokenbus.logs import logger
from tokenbus_contracts import ValueKind
from tokenbus_contracts.generated.control_pb2 import WeightTransferStage

_log = logger("worker")
_OF_STAGE = {
    WeightTransferStage.WEIGHT_TRANSFER_STAGE_INIT: ("init_weight_transfer_engine", "init_info"),
    WeightTransferStage.WEIGHT_TRANSFER_STAGE_START: ("start_weight_update", ""),
    WeightTransferStage.WEIGHT_TRANSFER_STAGE_UPDATE: ("update_weights", "update_info"),
    WeightTransferStage.WEIGHT_TRANSFER_STAGE_FINISH: ("finish_weight_update", ""),
    WeightTransferStage.WEIGHT_TRANSFER_STAGE_SHUTDOWN: ("shutdown_weight_transfer_engine", ""),
}
"""For each stage of a weight update, vLLM's method, and the method's argument for the trainer's data."""


class ControlledCore:
    """An EngineCore of vLLM under operator control. `FullEngine` documents the methods."""

    def __init__(self, vllm: SimpleNamespace, config: Any, core: Any, model: Path) -> None:  # noqa: ANN401 - vLLM's
        self._vllm, self._config, self._core = vllm, config, core
        self._model = model
        self._weights: Path | None = model
        """Folder of the current weights, or None for weights from a trainer."""
        self._adapters: dict[str, Any] = {}
        """vLLM's LoRARequest of each loaded adapter."""
        self._adapter_number = self._weights_number = 0
        """How many adapters, and how many sets of weights, were loaded at run time."""
        self._is_paused = False
        self.weight_version = 0
        self.world_size: int = config.parallel_config.world_size
        self.facts = _facts(config)

    @property
    def lora_adapters(self) -> Sequence[str]:
        return tuple(self._adapters)

    def salted(self, cache_salt: str, adapter: str) -> str | None:
        """Add load counters to a request's cache salt, so that prompts cached with older weights are not reused."""
        known = self._adapters.get(adapter)
        marks = [("weights", self._weights_number), ("adapter", 0 if known is None else known.lora_int_id)]
        return cache_salt + "".join(f"@{kind}-{number}" for kind, number in marks if number) or None

    def pause(self, *, running: bool) -> None:
        """Stop scheduling new requests. If `running` is set, schedule no tokens at all."""
        states, self._is_paused = self._vllm.PauseState, True
        self._core.scheduler.set_pause_state(states.PAUSED_ALL if running else states.PAUSED_NEW)

    def resume(self) -> None:
        self._core.scheduler.set_pause_state(self._vllm.PauseState.UNPAUSED)
        self._is_paused = False

    def load_weights(self, folder: Path) -> None:
        """Load the weights of a folder. On failure, reload the previous weights."""
        given = _shapes_in(folder)
        for name, shape in _shapes_in(self._model).items():
            if (found := given.get(name)) != shape:
                raise ValueError(f"load_weights.folder: {name} of shape {shape}, as in the model, got {found}")
        try:
            self._call("reload_weights", weights_path=str(folder))
        except Exception as error:
            before = self._weights
            if before is None:
                raise
            _log.warning("weights not loaded: those before them are put back", folder=str(folder), reason=str(error))
            self._call("reload_weights", weights_path=str(before))
            raise ValueError(
                f"load_weights.folder: weights that vLLM can load, got {type(error).__name__}: {error}"
            ) from error
        self._weights = folder
        self._weights_number += 1

    def transfer_weights(self, stage: WeightTransferStage, arguments: Mapping[str, Any] | Sequence[Any]) -> None:
        if self._config.weight_transfer_config is None:
            raise ValueError("transfer_weights: vLLM must run with --weight-transfer-config, but it does not")
        method, argument = _OF_STAGE[stage]
        if stage == WeightTransferStage.WEIGHT_TRANSFER_STAGE_UPDATE:
            self._weights = None
        if argument:
            self._call(method, **{argument: self._own(arguments)})
        else:
            taken = inspect.signature(getattr(self._vllm.Worker, method)).parameters
            known = {name: value for name, value in dict(arguments).items() if name in taken}
            self._call(method, **known)
        if stage == WeightTransferStage.WEIGHT_TRANSFER_STAGE_FINISH:
            self._weights_number += 1

    def _own(self, arguments: Any) -> Any:  # noqa: ANN401 - JSON
        """Pad a list of arguments, because each process indexes the list by its global data-parallel rank."""
        if isinstance(arguments, Mapping):
            return arguments
        return [{}] * (self._config.parallel_config.data_parallel_index * self.world_size) + list(arguments)

    def sleep(self, level: int) -> None:
        """Drop the caches. Level 1 also moves the weights to the host, and level 2 drops the weights."""
        if not self._config.model_config.enable_sleep_mode:
            raise ValueError(f"sleep.level: 0 without --enable-sleep-mode, got {level}")
        self.reset_prefix_cache(also_running=True)
        self._core.model_executor.sleep(level)

    def wake_up(self, tags: Sequence[str]) -> bool:
        """Reallocate memory, and return whether vLLM is fully awake."""
        executor = self._core.model_executor
        if executor.is_sleeping:
            executor.wake_up(list(tags) or None)
        return not executor.is_sleeping

    def reset_prefix_cache(self, *, also_running: bool = False) -> None:
        """Clear the prefix cache. Raise ValueError while requests run, unless `also_running` makes them recompute."""
        if not self._core.reset_prefix_cache(reset_running_requests=also_running):
            raise ValueError("reset_prefix_cache: running requests hold blocks of the cache")

    def collective_rpc(
        self, method: str, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Call a method in all of vLLM's worker processes, and return the results as vLLM's own HTTP route does.

        The method may change the weights. So cached prompts are no longer used, and `_weights` becomes None.
        """
        self._weights = None
        self._weights_number += 1
        results = self._core.collective_rpc(method, timeout=timeout, args=tuple(args), kwargs=dict(kwargs))
        return [each if each is None or isinstance(each, dict | list) else str(each) for each in results]

    def load_adapter(self, name: str, folder: Path, *, replace: bool) -> None:
        if self._config.lora_config is None:
            raise ValueError("load_adapter: vLLM must run with --enable-lora, but it does not")
        before = self._adapters.get(name)
        if before is not None and not replace:
            raise ValueError(f"load_adapter.name: {name!r} has already been loaded")
        self._load(checked("load_adapter.folder", Adapter(name, str(folder))))
        if before is not None:
            self._core.remove_lora(before.lora_int_id)

    def _load(self, adapter: Adapter) -> None:
        self._adapter_number += 1
        request = adapter.request(self._vllm, self._adapter_number)
        self._core.add_lora(request)
        self._adapters[adapter.name] = request

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Running requests continue to use the adapter."""
        request = self._adapters.pop(name, None)
        if request is None:
            raise ValueError(f"unload_adapter.name: one of {', '.join(self._adapters) or 'none'}, got {name!r}")
        self._core.remove_lora(request.lora_int_id)

    def _call(self, method: str, **arguments: Any) -> None:  # noqa: ANN401 - vLLM's
        self._core.collective_rpc(method, kwargs=arguments)


def _facts(config: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM's VllmConfig
    model, transfer, lora = config.model_config, config.weight_transfer_config, config.lora_config
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "value_kind": ValueKind[str(model.logprobs_mode).upper()],
        "weight_transfer": "" if transfer is None else str(transfer.backend),
        "max_adapters": 0 if lora is None else lora.max_loras,
        "max_adapter_rank": 0 if lora is None else lora.max_lora_rank,
    }


def _shapes_in(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors in a folder's safetensors files, or raise ValueError."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - installed with vLLM

    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        got = "one without" if folder.is_dir() else "no folder"
        raise ValueError(f"load_weights.folder: a folder with *.safetensors, got {got}: {folder}")
    shapes = {}
    for path in files:
        try:
            with safe_open(path, "pt") as tensors:
                shapes.update({name: tensors.get_slice(name).get_shape() for name in tensors.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"load_weights.folder: safetensors, got a damaged file: {path.name}: {error}") from None
    return shapes
