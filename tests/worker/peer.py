"""A worker's session, and a processor that the test plays."""

from collections.abc import Callable, Iterator
from typing import Any

from tests.in_process.builders import BATCH, EPOCH, hello_of
from tokenbus.bus.link import SessionState
from tokenbus.worker.retention import Retention
from tokenbus.worker.session import WorkerSession
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.request_pb2 import Abort, Generate
from tokenbus_contracts.generated.stream_pb2 import Credit, ProcessorFrame, Welcome, WorkerFrame

INTERVAL, TIMEOUT = 1.0, 3.0
FIRST = 1000.0
"""When everything begins; not zero, as with a machine's clock."""


def welcome_of(through: int = 1000, size: int = 2**30, **more: Any) -> Welcome:  # noqa: ANN401 - as the message has it
    usual: dict[str, Any] = {"processor_id": "p", "resume_from": 1}
    times = {"heartbeat_interval_ms": 1000, "heartbeat_timeout_ms": 3000}
    return Welcome(credit=Credit(through_sequence=through, bytes=size), **usual | times | more)


class Peer:
    def __init__(
        self, items: int = 0, *, retention: Retention | None = None, processors: int = 1, abandon_after: float = 0
    ) -> None:
        self.retention = retention or Retention(100, 1000, checksum=True)
        for number in range(items):
            self.retention.keep(BATCH, bytes([number]))
        self.session = WorkerSession(
            hello_of(first_sequence=1, next_sequence=1), EPOCH, self.retention, interval=INTERVAL, timeout=TIMEOUT,
            on_request=self._request, on_room=self._room, processors=processors, abandon_after=abandon_after,
        )  # fmt: skip
        self.on_request: Callable[[Generate | Abort], None] = lambda _: None
        self.on_room: Callable[[], None] = lambda: None
        self.now = FIRST

    def _request(self, request: Generate | Abort) -> None:
        self.on_request(request)

    def _room(self) -> None:
        self.on_room()

    def hear(self, **body: Any) -> None:  # noqa: ANN401 - as the frame has it
        self.session.receive([write_frame(ProcessorFrame(**body))], self.now)

    def welcome(self, through: int = 100, size: int = 1000, *, resume_from: int = 1, **more: Any) -> None:  # noqa: ANN401
        self.hear(welcome=welcome_of(through, size, resume_from=resume_from, **more))

    def state(self) -> SessionState:
        return self.session.state

    def says(self) -> WorkerFrame | None:
        message = self.session.next_message(self.now)
        return None if message is None else read_frame(WorkerFrame, message[0])

    def must_say(self) -> WorkerFrame:
        frame = self.says()
        assert frame is not None
        return frame

    def says_all(self) -> Iterator[WorkerFrame]:
        while (frame := self.says()) is not None:
            yield frame

    def sequences(self) -> list[int]:
        return [frame.item.sequence for frame in self.says_all() if frame.HasField("item")]


def opened(items: int = 0, through: int = 100, size: int = 1000, **more: Any) -> Peer:  # noqa: ANN401 - as in `welcome`
    peer = Peer(items)
    assert peer.says() is not None
    peer.welcome(through, size, **more)
    return peer
