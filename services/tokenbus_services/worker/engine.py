"""Engine: what a worker runs."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_services.worker.step import StepArrays


class EngineBrokenError(RuntimeError):
    """The engine says that no further step can succeed: its worker ends its requests, and stops."""


class EngineStepError(RuntimeError):
    """A step failed, gave no tokens, and left every request that is not named as it was before it.

    The named requests end. If none is named, those end that were admitted since the last step that succeeded, and if
    there are none, all. The engine computes the others' next step.
    """

    def __init__(self, message: str, keys: Iterable[int] = ()) -> None:
        """Take why it failed, and the keys of the requests that it failed for, if they are known."""
        super().__init__(message)
        self.keys = frozenset(keys)


class Engine(Protocol):
    """Computes steps for the requests that it was given. One thread uses it.

    Whatever a method raises ends requests, never the worker, with the exception of an EngineBrokenError.

    Example:
        from tokenbus_engines.synthetic import SyntheticEngine

        engine: tokenbus.Engine = SyntheticEngine()
        prompt_tokens = engine.admit(tokenbus.Generate(request_key=7, tokens={"token_ids": [1, 2]}, sampling={}))
        (step,) = engine.step()
    """

    @property
    def vocabulary_size(self) -> int:
        """How many token ids it has."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def admit(self, generate: Generate, state: bytes | None = None) -> int:
        """Take a request, and return how long its prompt is in tokens; a ValueError says what is wrong with it.

        With a state it is one that a prefill engine handed off, to go on from there. It came over the network: each
        number of it is checked before anything is allocated or changed. Whatever this raises, the engine does not have
        the request afterwards.
        """

    def abort(self, key: int) -> None:
        """End a request at the next step, which computes nothing for it; one that is not known needs no end."""

    def step(self) -> Sequence[StepArrays]:
        """Compute a step, and return its batches in the order in which they are to be published.

        An EngineStepError ends some requests. After any other exception it is not known what of the step was computed:
        all requests end, and are aborted.
        """

    def close(self) -> None:
        """Let go of what it holds; no other method is called afterwards."""
