"""Engine: the interface of a worker's engine."""

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from tokenbus import plugins
from tokenbus.settings import Settings
from tokenbus.worker.step import StepArrays
from tokenbus_contracts.generated.control_pb2 import WeightTransferStage
from tokenbus_contracts.generated.request_pb2 import Generate


class EngineBrokenError(RuntimeError):
    """No further step can succeed, so the worker ends its requests and stops."""


class EngineStepError(RuntimeError):
    """A step failed without returning tokens, and changed only the requests that the error names.

    The worker ends the named requests. If the error names no requests, the worker ends the requests admitted since the
    last successful step, or else all requests. The next step computes the remaining requests.
    """

    def __init__(self, message: str, request_ids: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.request_ids = frozenset(request_ids)


class Engine(Protocol):
    """Admits requests, and computes steps for them. A single thread calls all methods.

    An exception of any method ends requests, but only an EngineBrokenError ends the worker.

    Example:
        from tokenbus.engines.synthetic import SyntheticEngine

        engine: tokenbus.Engine = SyntheticEngine()
        prompt_tokens = engine.admit(tokenbus.Generate(request_id=7, tokens={"token_ids": [1, 2]}, sampling={}))
        (step,) = engine.step()
    """

    @property
    def vocabulary_size(self) -> int:
        """Size of the vocabulary."""

    @property
    def has_work(self) -> bool:
        """Whether a step would have anything to compute."""

    def admit(self, generate: Generate) -> int:
        """Admit a request, and return the length of its prompt in tokens.

        Raises ValueError with a one-line message for the client if the request is invalid. After any exception, the
        request is not admitted.
        """

    def abort(self, request_id: int) -> None:
        """End a request at the next step, without computing more tokens. An unknown id is ignored."""

    def step(self) -> Sequence[StepArrays]:
        """Compute a step, and return its batches in the order of publication.

        An EngineStepError ends some requests. After any other exception the state of the requests is unknown, so the
        worker ends and aborts all requests.
        """

    def close(self) -> None:
        """Free all resources. No other method is called afterwards."""


_MEMBERS = ("admit", "abort", "step", "close", "has_work", "vocabulary_size")


def is_engine(value: object) -> TypeGuard[Engine]:
    """Return whether an object has the members of `Engine` and is not a class."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in _MEMBERS)


def engine_of(engine: Engine | Callable[[], Engine]) -> Engine:
    """Return the engine, or the engine that the function returns. Raises TypeError for anything else."""
    made = engine() if callable(engine) and not is_engine(engine) else engine
    if is_engine(made):
        return made
    lacking = ", ".join(name for name in _MEMBERS if not hasattr(made, name))
    expected = "an engine or a function that makes one (see tokenbus.BaseEngine)"
    raise TypeError(f"{expected}, got {type(made).__name__}, which lacks {lacking or 'an instance'}")


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """Facts about an engine, which a worker sends in the hello's fields of the same names."""

    max_model_tokens: int = 0
    tokenizer_digest: int = 0
    tokenizer_probes: Sequence[int] = ()
    lora_adapters: Sequence[str] = ()
    takes_control: bool = False
    continues_requests: bool = False
    token_scores: Sequence[str] = ()


NO_DESCRIPTION = EngineDescription()


class FullEngine(Engine, Protocol):
    """Engine with all optional members. A real engine may lack any optional member.

    Operators' commands call the methods between two steps, on the engine's thread. A command for a missing method is
    refused. If the method raises an exception, the command is refused with the exception's one-line message.
    """

    dp_rank: int
    """Data-parallel rank in the worker's handshake and batches."""
    max_model_tokens: int
    """Maximum length of a prompt and its output together, in tokens."""
    tokenizer_digest: int
    """Result of `tokenizer_probes.digest_of` for the engine's tokenizer, or 0 if unknown."""
    tokenizer_probes: Sequence[int]
    """Result of `tokenizer_probes.probed` for the engine's tokenizer."""
    lora_adapters: Sequence[str]
    """LoRA adapters that requests may name."""
    token_scores: Collection[str]
    """Fields of `token_scoring` for which the engine fills arrays of `StepArrays`. Other fields are refused."""
    continues_requests: bool
    """Whether the engine can continue a request that begins with the output tokens in `Generate.continuation`.

    The first new token has the position after these tokens. `max_tokens`, `min_tokens` and stops also count the
    continuation's tokens. `admit` raises ValueError for parameters with which the engine cannot continue.

    Decode workers need an engine that continues requests. In a decode worker, `continuation.transfer_state` is the
    value from the prefill worker's `StepArrays.transfer_states`, if any. An engine that cannot use the transfer state
    computes the tokens again.
    """
    kv_cache_usage: float
    """Fill level of the prefix cache, from 0 to 1. `StepArrays.cached_prompts` lists requests with cached tokens."""
    weight_version: int
    """Version of the weights, or 0 if unknown. CommandRunner sets the version after each change of the weights."""
    world_size: int
    """Number of processes that compute together."""
    facts: Mapping[str, Any]
    """Further fields of `EngineState` for trainers, such as `dtype` and `value_kind`."""

    def encode(self, text: str) -> Sequence[int]:
        """Return a prompt's token ids. Before `admit`, the worker replaces text prompts of sessions by token ids."""

    def pause(self, *, running: bool) -> None:
        """Pause all requests that are not running yet. If `running` is set, also pause the running requests.

        Requests can still be admitted and aborted. If `running` is set, the engine becomes idle after the launched
        steps. Otherwise, the engine first finishes the running requests.
        """

    def resume(self) -> None:
        """End the pause of all requests."""

    def load_weights(self, folder: Path) -> None:
        """Replace the engine's weights by the weights in a folder. Called only while the engine has no work.

        After a ValueError the old weights are in place. After any other exception the weights count as damaged.
        """

    def transfer_weights(self, stage: WeightTransferStage, arguments: Mapping[str, Any] | Sequence[Any]) -> None:
        """Run one stage of a trainer's update. An exception in the stages UPDATE and FINISH damages the weights.

        `arguments` is a mapping for all processes, or a list with the arguments of each process.
        """

    def sleep(self, level: int) -> None:
        """Free memory of the device. Called only while the engine has no work."""

    def wake_up(self, tags: Sequence[str]) -> bool:
        """Reallocate the tagged parts of memory, or all parts if `tags` is empty. Return whether all parts exist."""

    def reset_prefix_cache(self, *, also_running: bool) -> None:
        """Clear the prefix cache. If `also_running` is set, running requests compute their prefixes again."""

    def collective_rpc(
        self, method: str, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Sequence[Any]:
        """Call a method in each computing process, and return results that JSON can represent."""

    def load_adapter(self, name: str, folder: Path, *, replace: bool) -> None:
        """Load a LoRA adapter, and add its name to `lora_adapters`."""

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine for `tokenbus worker --engine NAME`, from an entry point of `tokenbus.engines`.

    Every command that lists the engines imports the modules of all engines, so heavy imports belong in `make`.
    """

    summary: str
    """Description of the engine in one line."""
    declare: Callable[[argparse.ArgumentParser], None]
    """Adds the engine's options to the command's parser. The names of the command's own options are reserved."""
    make: Callable[[argparse.Namespace, Settings], Engine]
    """Creates the engine on the engine's thread.

    Raises ValueError for a wrong option, and RuntimeError or ImportError for a missing requirement.
    """
    tokenizer: str = "numbers"
    """Tokenizer for the gateway: an entry point of `tokenbus.tokenizers`, or `numbers` for ids without text."""
    reads_model: bool = False
    """Whether the engine reads the folder that `--model` names, which is `options.model` or None.

    Clients use the model's name in `worker.model`, which defaults to the folder's name.
    """
    publishes_apart: bool = False
    """Whether the engine's workers publish in another process if the platform allows that."""
    takes_rest: bool = False
    """Whether the engine parses the arguments after `--`, which are in `options.rest`."""
    ranks: Callable[[Sequence[str]], list[list[str]]] = lambda rest: [list(rest)]
    """Splits the arguments after `--` into a list for each data-parallel rank that `tokenbus up` starts."""
    model_name: Callable[[Sequence[str]], str] = lambda _: ""
    """Returns the model's name from the arguments after `--`, or an empty string to use the folder's name."""


def engine_kind(name: str) -> EngineKind:
    """Return the installed engine with a name, or raise PluginError."""
    return plugins.load(plugins.ENGINES, name, EngineKind)
