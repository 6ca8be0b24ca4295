"""What no codec can beat: moving the same bytes and doing nothing with them."""

from collections.abc import Sequence

from benchmarks.codec.ours import message_of
from benchmarks.codec.peer import Peer, Queues
from benchmarks.codec.sockets import Pipe
from benchmarks.workload import Step


class _Limit(Peer):
    delivers = False

    def __init__(self) -> None:
        """Start without messages."""
        self._messages: dict[int, bytes] = {}

    def prepare(self, steps: Sequence[Step]) -> None:
        """Encode the steps beforehand."""
        self._messages = {id(step): message_of(step) for step in steps}


class RawZeroMQ(_Limit):
    """A ZeroMQ send and recv of our bytes."""

    name = "zeromq"
    label = "limit: ZeroMQ send+recv"
    short = "zmq"
    includes = "PUSH/PULL over ipc in this process, messages copied; our message, already encoded; no delivery"

    def __init__(self, pipe: Pipe) -> None:
        """Use a pipe that somebody else closes."""
        super().__init__()
        self._pipe = pipe

    def carry(self, step: Step, queues: Queues) -> int:  # noqa: ARG002 - nothing is delivered
        """Send and receive."""
        return len(self._pipe.through(self._messages[id(step)]))


class RawZeroMQElsewhere(RawZeroMQ):
    """The same with ZeroMQ's own thread on another core."""

    name = "zeromq_other_core"
    label = "limit: ZeroMQ, two cores"
    short = "zmq 2c"
    includes = "the same with ZeroMQ's own thread on another core, as it is where nothing is pinned"


class Memcpy(_Limit):
    """One copy of our bytes."""

    name = "memcpy"
    label = "limit: memcpy"
    short = "memcpy"
    includes = "one copy of our message, already encoded, into memory that is there; no delivery"

    def __init__(self) -> None:
        """Start without room."""
        super().__init__()
        self._room = memoryview(b"")

    def prepare(self, steps: Sequence[Step]) -> None:
        """Make room for the longest message."""
        super().prepare(steps)
        self._room = memoryview(bytearray(max(map(len, self._messages.values()))))

    def carry(self, step: Step, queues: Queues) -> int:  # noqa: ARG002 - nothing is delivered
        """Copy."""
        message = self._messages[id(step)]
        self._room[: len(message)] = message
        return len(message)
