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
    """No further step can succeed: the worker ends its requests, and stops."""


class EngineStepError(RuntimeError):
    """A step failed without tokens, and changed only the requests that the error names.

    The worker ends the named requests. If the error names none, it ends the requests admitted since the last successful
    step; without such requests it ends all. The next step computes the remaining requests.
    """

    def __init__(self, message: str, request_ids: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.request_ids = frozenset(request_ids)


class Engine(Protocol):
    """Admits requests, and computes steps for them. One thread uses it.

    An exception of any method ends requests; only an EngineBrokenError ends the worker.

    Example:
        from tokenbus.engines.synthetic import SyntheticEngine

        engine: tokenbus.Engine = SyntheticEngine()
        prompt_tokens = engine.admit(tokenbus.Generate(request_id=7, tokens={"token_ids": [1, 2]}, sampling={}))
        (step,) = engine.step()
    """

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""

    @property
    def has_work(self) -> bool:
        """Whether a step would have anything to compute."""

    def admit(self, generate: Generate) -> int:
        """Admit a request, and return the length of its prompt in tokens.

        Raises ValueError, with one line for the client, for an invalid request. After an exception the request is not
        admitted.
        """

    def abort(self, request_id: int) -> None:
        """End a request at the next step, which computes nothing for it; ignore an unknown id."""

    def step(self) -> Sequence[StepArrays]:
        """Compute a step, and return its batches in the order of publication.

        An EngineStepError ends some requests. After any other exception the state of the requests is unknown, so the
        worker ends and aborts all of them.
        """

    def close(self) -> None:
        """Free all resources; no other method is called afterwards."""


_MEMBERS = ("admit", "abort", "step", "close", "has_work", "vocabulary_size")


def is_engine(value: object) -> TypeGuard[Engine]:
    """Return whether an object has the members of `Engine`; a class has them too, but is not an engine."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in _MEMBERS)


def engine_of(engine: Engine | Callable[[], Engine]) -> Engine:
    """Return the engine, or call the function and return its engine; raises TypeError for anything else."""
    made = engine() if callable(engine) and not is_engine(engine) else engine
    if is_engine(made):
        return made
    lacking = ", ".join(name for name in _MEMBERS if not hasattr(made, name))
    expected = "an engine or a function that makes one (see tokenbus.BaseEngine)"
    raise TypeError(f"{expected}, got {type(made).__name__}, which lacks {lacking or 'an instance'}")


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """The facts about an engine in a worker's handshake, named as the fields of the hello."""

    max_model_tokens: int = 0
    tokenizer_digest: int = 0
    tokenizer_probes: Sequence[int] = ()
    lora_adapters: Sequence[str] = ()
    takes_control: bool = False
    continues_requests: bool = False
    token_scores: Sequence[str] = ()


NO_DESCRIPTION = EngineDescription()


class FullEngine(Engine, Protocol):
    """An engine with all optional members; an engine may lack any of them.

    Operators control an engine by its methods, which are called between two steps, on the engine's thread; a command
    for a missing method is refused. An exception refuses the command; its message is one line for the operator.
    """

    dp_rank: int
    """The data-parallel rank in the worker's handshake and batches."""
    max_model_tokens: int
    """The largest sum of a request's prompt and output, in tokens."""
    tokenizer_digest: int
    """The result of `tokenizer_probes.digest_of` for its tokenizer; 0: unknown."""
    tokenizer_probes: Sequence[int]
    """The result of `tokenizer_probes.probed` for its tokenizer."""
    lora_adapters: Sequence[str]
    """The LoRA adapters that requests may name."""
    token_scores: Collection[str]
    """The fields of a request's `token_scoring` for which it fills arrays of `StepArrays`; others are refused."""
    continues_requests: bool
    """Whether it continues a request after the tokens of `Generate.continuation`.

    The first new token has the position after them. `max_tokens`, `min_tokens` and stops also count these tokens.
    `admit` raises ValueError for parameters with which the engine cannot continue.

    Workers of the role decode need such an engine. In a decode worker, `continuation.transfer_state` is the value from
    the prefill worker's `StepArrays.transfer_states`, if any. It came over the network: an engine that cannot use it
    computes the tokens again.
    """
    kv_cache_usage: float
    """Used share of its prefix cache, from 0 to 1; `StepArrays.cached_prompts` lists requests with cached tokens."""
    weight_version: int
    """Version of its weights, which its batches carry; 0: unknown. CommandRunner sets it after each change."""
    world_size: int
    """Number of processes that compute together."""
    facts: Mapping[str, Any]
    """Further fields of `EngineState` for trainers: `dtype`, `value_kind`."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the token ids of a prompt; a text prompt of a session reaches `admit` as these ids."""

    def pause(self, *, running: bool) -> None:
        """Begin no new requests; with `running`, stop the running ones too.

        Requests are still admitted and aborted. With `running`, the engine is idle once the launched steps are done;
        otherwise once the running requests are done too.
        """

    def resume(self) -> None:
        """Compute all requests again."""

    def load_weights(self, folder: Path) -> None:
        """Replace the weights by the ones in a folder; called only without work.

        After a ValueError the old weights are in place; after any other exception the weights count as damaged.
        """

    def transfer_weights(self, stage: WeightTransferStage, arguments: Mapping[str, Any] | Sequence[Any]) -> None:
        """Run one stage of a trainer's update; after the first stage any exception damages the weights.

        `arguments` are for all processes, or are a list with the arguments of each process.
        """

    def sleep(self, level: int) -> None:
        """Free memory of its device; called only without work."""

    def wake_up(self, tags: Sequence[str]) -> bool:
        """Allocate the tagged parts of the memory again (without tags, all parts); return whether all are allocated."""

    def reset_prefix_cache(self, *, also_running: bool) -> None:
        """Clear the prefix cache; `also_running` makes running requests compute their prefixes again."""

    def collective_rpc(
        self, method: str, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Sequence[Any]:
        """Call a method in each process that computes; return the results, as JSON can represent them."""

    def load_adapter(self, name: str, folder: Path, *, replace: bool) -> None:
        """Load a LoRA adapter into `lora_adapters`."""

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine for `tokenbus worker --engine NAME`, from an entry point of `tokenbus.engines`.

    A list of the engines imports the module of each kind, so heavy imports belong in `make`.
    """

    summary: str
    """Description in one line."""
    declare: Callable[[argparse.ArgumentParser], None]
    """Adds the engine's options to the command's parser; the names of the command's own options are taken."""
    make: Callable[[argparse.Namespace, Settings], Engine]
    """Makes the engine, on the engine's thread.

    Raises ValueError for a wrong option, and RuntimeError or ImportError for a missing requirement.
    """
    tokenizer: str = "numbers"
    """The gateway's tokenizer: an entry point of `tokenbus.tokenizers`, or `numbers` for ids without text."""
    reads_model: bool = False
    """Whether the engine reads the folder that `--model` names. `options.model` is that folder; None without it.

    Clients use the name in `worker.model`, by default the folder's name.
    """
    publishes_apart: bool = False
    """Whether its workers publish in another process, if the platform allows it."""
    takes_rest: bool = False
    """Whether the engine parses the command line after `--`, given as `options.rest`."""
    ranks: Callable[[Sequence[str]], list[list[str]]] = lambda rest: [list(rest)]
    """Splits the command line after `--` into one per data-parallel rank; `tokenbus up` starts a worker for each."""
    model_name: Callable[[Sequence[str]], str] = lambda _: ""
    """Returns the model's name from the command line after `--`; empty: the folder's. Raises ValueError."""


def engine_kind(name: str) -> EngineKind:
    """Return the installed engine of that name; raises PluginError."""
    return plugins.load(plugins.ENGINES, name, EngineKind)
