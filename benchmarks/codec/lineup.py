"""Who takes part in a run, in the order of the tables, and who cannot and why."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from benchmarks.codec.fastdeploy_pickle import Pickle
from benchmarks.codec.fastdeploy_struct import SysVStruct
from benchmarks.codec.generated import GeneratedClasses
from benchmarks.codec.limits import Memcpy, RawZeroMQ, RawZeroMQElsewhere
from benchmarks.codec.ours import Lists, ThroughZeroMQ, Views
from benchmarks.codec.peer import Peer
from benchmarks.codec.sockets import Pipe
from benchmarks.codec.vllm import Installed, InstalledToItsEnd, MsgspecShape
from benchmarks.errors import NotRunError
from benchmarks.machine import Placement, on_cores

PEERS: tuple[type[Peer], ...] = (
    Views,
    Lists,
    ThroughZeroMQ,
    SysVStruct,
    Pickle,
    Installed,
    InstalledToItsEnd,
    MsgspecShape,
    GeneratedClasses,
    RawZeroMQ,
    RawZeroMQElsewhere,
    Memcpy,
)


@contextmanager
def lineup(placement: Placement) -> Iterator[tuple[list[Peer], dict[str, str]]]:
    """Yield the peers that run here, and for every other one its name and the reason."""
    with ExitStack() as stack:
        pipe = stack.enter_context(Pipe())

        def elsewhere() -> AbstractContextManager[Peer]:
            if not placement.others:
                raise NotRunError("not run: there is no other core to use")
            with on_cores(placement.others):  # where the sockets are made, there their thread stays
                return RawZeroMQElsewhere(stack.enter_context(Pipe()))

        makers: dict[type[Peer], Callable[[], AbstractContextManager[Peer]]] = {
            ThroughZeroMQ: lambda: ThroughZeroMQ(pipe),
            RawZeroMQ: lambda: RawZeroMQ(pipe),
            RawZeroMQElsewhere: elsewhere,
            SysVStruct: SysVStruct.opened,
        }
        peers: list[Peer] = []
        absent: dict[str, str] = {}
        for kind in PEERS:
            try:
                peers.append(stack.enter_context(makers.get(kind, kind)()))
            except NotRunError as error:
                absent[kind.name] = str(error)
        yield peers, absent
