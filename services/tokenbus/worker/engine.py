"""Engine: what a worker runs."""

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tokenbus import plugins
from tokenbus.settings import Settings
from tokenbus.worker.step import StepArrays
from tokenbus_contracts.generated.control_pb2 import WeightTransferStage
from tokenbus_contracts.generated.request_pb2 import Generate


class EngineBrokenError(RuntimeError):
    """No further step can succeed: the worker ends its requests, and stops."""


class EngineStepError(RuntimeError):
    """A step failed, gave no tokens, and left every request that is not named as it was before it.

    The named requests end. If none is named, those end that were admitted since the last step that succeeded; if there
    are none, all end. The engine computes the others' next step.
    """

    def __init__(self, message: str, request_ids: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.request_ids = frozenset(request_ids)


class Engine(Protocol):
    """Computes steps for the requests that it admitted. One thread uses it.

    An exception of any method ends requests, and never the worker, unless it is an EngineBrokenError.

    Example:
        from tokenbus.engines.synthetic import SyntheticEngine

        engine: tokenbus.Engine = SyntheticEngine()
        prompt_tokens = engine.admit(tokenbus.Generate(request_id=7, tokens={"token_ids": [1, 2]}, sampling={}))
        (step,) = engine.step()
    """

    @property
    def vocabulary_size(self) -> int:
        """How many token ids there are."""

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""

    def admit(self, generate: Generate) -> int:
        """Admit a request, and return the length of its prompt in tokens.

        A request whose admission raised is not the engine's. Raises ValueError, with one line for the client, for a
        request that is wrong.
        """

    def abort(self, request_id: int) -> None:
        """End a request at the next step, which computes nothing for it; an unknown id is ignored."""

    def step(self) -> Sequence[StepArrays]:
        """Compute a step, and return its batches in the order in which they are to be published.

        An EngineStepError ends some requests. After any other exception it is unknown what the step computed: all
        requests end, and are aborted.
        """

    def close(self) -> None:
        """Free what it holds; no other method is called afterwards."""


@runtime_checkable
class ScoresTokens(Protocol):
    """An engine that says more of tokens than their logprobs, ranks and alternatives; others are not asked for it."""

    @property
    def token_scores(self) -> Collection[str]:
        """Which fields of a request's `token_scoring` it fills the arrays of `StepArrays` for."""


@runtime_checkable
class CachesPrompts(Protocol):
    """An engine with a cache of prompts: `StepArrays.cached_prompts` names each request that needed less computing."""

    @property
    def kv_cache_usage(self) -> float:
        """How much of the cache requests use, from 0 to 1."""


@runtime_checkable
class ContinuesRequests(Protocol):
    """An engine that goes on after the tokens of `Generate.continuation`; others are not asked to.

    The first token that it emits has the position behind them. `max_tokens`, `min_tokens` and stops count them as its
    own. `admit` raises ValueError for parameters with which it cannot go on.

    Workers of the role decode run such engines only. There `continuation.transfer_state` has what the prefill worker's
    engine gave as `StepArrays.transfer_states`, if it gave any. It came over the network: an engine that cannot use it
    computes the tokens again.
    """

    continues_requests: bool
    """True."""


@runtime_checkable
class DescribesModel(Protocol):
    """An engine that says more of its model, which clients learn from the worker's handshake.

    It may also have `tokenizer_probes`, what `tokenizer_probes.probed` returns for its tokenizer.
    """

    @property
    def max_model_tokens(self) -> int:
        """How many tokens a request's prompt and output may have together."""

    @property
    def tokenizer_digest(self) -> int:
        """What `tokenizer_probes.digest_of` returns for its tokenizer; 0: not known."""

    @property
    def lora_adapters(self) -> Sequence[str]:
        """The LoRA adapters that requests may name; a request for another one is not sent to it."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that describes itself, apart from its engine."""

    max_model_tokens: int
    tokenizer_digest: int
    tokenizer_probes: Sequence[int] = ()
    lora_adapters: Sequence[str] = ()


class ControlledEngine(Engine, Protocol):
    """An engine that operators may control while it runs. It need not have all of these: what it lacks is refused.

    They are called between two steps, on the engine's own thread. An exception refuses the command, with its message:
    one line for the operator.
    """

    weight_version: int
    """Which version its weights are, which the batches of its steps carry; 0: not known. Who loads weights sets it."""
    world_size: int
    """How many processes compute together."""
    facts: Mapping[str, Any]
    """What trainers read of it before they begin, by the fields of `EngineState`: `dtype`, `value_kind`."""

    def pause(self, *, running: bool) -> None:
        """Begin no new request, and if `running` compute nothing of those that run either.

        Requests are admitted and aborted all the same. Once what was launched is finished, and of those that run what
        is to be computed, it has no work.
        """

    def resume(self) -> None:
        """Compute all requests again."""

    def load_weights(self, folder: Path) -> None:
        """Take the weights in a folder, in the place of its own.

        Only called while it has no work. A ValueError leaves it with the weights that it had; after any other exception
        they are taken for damaged.
        """

    def transfer_weights(self, stage: WeightTransferStage, arguments: Mapping[str, Any] | Sequence[Any]) -> None:
        """Do one stage of an update that a trainer sends; as above, once it has begun any exception is damage.

        The arguments are for all of its processes, or a list has them for each.
        """

    def sleep(self, level: int) -> None:
        """Free memory of its device. Only called while it has no work."""

    def wake_up(self, tags: Sequence[str]) -> bool:
        """Take memory again, those parts or without any all of it; return whether all is there."""

    def reset_prefix_cache(self, *, also_running: bool) -> None:
        """Forget the prefixes of prompts that it keeps; those that run compute theirs again, or are in the way."""

    def collective_rpc(
        self, method: str, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Sequence[Any]:
        """Call a method of each process that computes; return the results, as JSON can have them."""

    def load_adapter(self, name: str, folder: Path, *, replace: bool) -> None:
        """Load a LoRA adapter; `lora_adapters` has it from then on."""

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter."""


@runtime_checkable
class DataParallelRank(Protocol):
    """An engine that says which data-parallel rank it is; any other is the first."""

    @property
    def dp_rank(self) -> int:
        """The rank, which the worker's handshake and its batches carry."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine that `tokenbus worker --engine NAME` can run, as an entry point of `tokenbus.engines` names it.

    The module that holds it is imported whenever the engines are listed, so heavy imports belong in `make`.
    """

    summary: str
    """What it is, in one line."""
    declare: Callable[[argparse.ArgumentParser], None]
    """Adds the engine's own options to the command's parser; no name may be one of the command's."""
    make: Callable[[argparse.Namespace, Settings], Engine]
    """Makes the engine, on the thread that steps it.

    A ValueError says which option is wrong, a RuntimeError or ImportError what is missing.
    """
    tokenizer: str = "numbers"
    """The gateway's tokenizer for it: an entry point of `tokenbus.tokenizers`, or `numbers` for ids without text."""
    reads_model: bool = False
    """Whether it reads a model from a folder: `--model` is that folder then, as `options.model`, or None.

    The name that clients use is `worker.model` as any setting is given, and the folder's name by default.
    """
    publishes_apart: bool = False
    """Whether its workers publish in a process of their own, where they can."""
    takes_rest: bool = False
    """Whether what follows `--` on the command line is the engine's own: `options.rest`, as it was typed."""
    ranks: Callable[[Sequence[str]], list[list[str]]] = lambda rest: [list(rest)]
    """From what follows `--`, the same for each data-parallel rank; `tokenbus up` starts a worker for each."""
    model_name: Callable[[Sequence[str]], str] = lambda _: ""
    """From what follows `--`, the name that clients use where `worker.model` has none; empty: the folder's.

    A ValueError says what is wrong with it.
    """


def engine_kind(name: str) -> EngineKind:
    """Return the installed engine of that name; a PluginError of one line says why there is none."""
    return plugins.load(plugins.ENGINES, name, EngineKind)
