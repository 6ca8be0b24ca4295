"""PublisherClient: what an engine's loop, and any other owner of an engine, publishes through."""

from typing import Protocol

from tokenbus.settings import Settings
from tokenbus.worker.active import ActiveRequests
from tokenbus.worker.publisher import ReceivedHandoff
from tokenbus.worker.step import StepArrays
from tokenbus_contracts.generated.control_pb2 import Control, ControlAnswer
from tokenbus_contracts.generated.request_pb2 import Abort, ErrorCode, Generate, PromptScoresChunk


class LoopCounts(Protocol):
    """Counters of the engine's loop."""

    failed_steps: int
    engine_errors: int


class PublisherClient(Protocol):
    """The engine's side of a publisher: an Emitter in the engine's process, or a PublisherProcess."""

    settings: Settings
    active: ActiveRequests
    """The requests that the engine has."""
    epoch: int

    @property
    def counts(self) -> LoopCounts:
        """The counters of the engine's loop."""

    @property
    def is_running(self) -> bool:
        """Whether it publishes."""

    def admitted(self, key: int, prompt_tokens: int) -> None:
        """Publish that the engine admitted a request."""

    def scored(self, chunk: PromptScoresChunk) -> None:
        """Publish what the engine says of some of a prompt's tokens: a chunk, behind those before."""

    def controlled(self, answer: ControlAnswer) -> None:
        """Publish what became of a command."""

    def failed(self, key: int, code: ErrorCode, message: str) -> None:
        """Publish that a request ended with an error."""

    def emit(self, arrays: StepArrays) -> None:
        """Publish one batch of a step."""

    def take_requests(self, seconds: float = 0) -> list[Generate | Abort]:
        """Return the requests and aborts that came since the last call; block for at most so many seconds for some."""

    def take_controls(self) -> list[Control]:
        """Return operators' commands that came since the last call, in their order; one may come twice."""

    def take_handoffs(self) -> list[ReceivedHandoff]:
        """Return the hand-offs to this worker since the last call."""

    def take_aborts(self) -> list[int]:
        """Return the requests that ended because their rows could not be published: the engine is to end them too."""

    def forget(self, key: int) -> None:
        """Drop a hand-off that the engine refused."""
