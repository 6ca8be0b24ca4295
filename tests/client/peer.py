"""A client's session, and a processor that the test plays."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.in_process.builders import client_hello, settings
from tokenbus.bus.link import SessionState
from tokenbus.client.requests import OpenRequests
from tokenbus.client.session import ClientSession
from tokenbus.client.tokens import RequestTokens
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import BatchKind, encode
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.client_pb2 import ClientFrame, ClientWelcome, Outputs, ServerFrame
from tokenbus_contracts.generated.stream_pb2 import RefusalReason

INTERVAL, TIMEOUT = 1.0, 3.0
FIRST = 1000.0
"""When everything begins; not zero, as with a machine's clock."""
HELLO_FIRST = RefusalReason.REFUSAL_REASON_HELLO_FIRST


class Peer:
    def __init__(
        self,
        most: int = 100,
        *,
        requests: OpenRequests | None = None,
        has_several: bool = False,
        window: Mapping[str, int] | None = None,
    ) -> None:
        self.requests = OpenRequests(most, patience=30.0, has_several=has_several) if requests is None else requests
        self.session = ClientSession(
            client_hello(**window or {}), self.requests, settings().limits, interval=INTERVAL, timeout=TIMEOUT
        )
        self.now = FIRST
        self.number = 0

    def state(self) -> SessionState:
        return self.session.state

    def hear(self, *parts: bytes, number: int = 0, **body: Any) -> None:  # noqa: ANN401 - as the frame has it
        self.session.receive([write_frame(ServerFrame(number=number, **body)), *parts], self.now)

    def numbered(self, *parts: bytes, **body: Any) -> None:  # noqa: ANN401 - as the frame has it
        self.number += 1
        self.hear(*parts, number=self.number, **body)

    def welcome(self, *, resumed: bool = False, processor_id: str = "p", **more: Any) -> None:  # noqa: ANN401
        self.number = 0
        usual: dict[str, Any] = {"heartbeat_interval_ms": 1000, "heartbeat_timeout_ms": 3000}
        self.hear(welcome=ClientWelcome(processor_id=processor_id, resumed=resumed, **usual | more))

    def rows(self, *wanted: RowShape, drafted: Sequence[RowShape] = ()) -> None:
        parts = [encode(batch(wanted, selection=True, draft_follows=bool(drafted)))]
        if drafted:
            parts.append(encode(batch(drafted, selection=True, kind=BatchKind.DRAFT)))
        self.numbered(*parts, outputs=Outputs(has_draft=bool(drafted)))

    def says(self) -> ClientFrame | None:
        message = self.session.next_message(self.now)
        return None if message is None else read_frame(ClientFrame, message[0])

    def says_all(self) -> Iterator[ClientFrame]:
        while (frame := self.says()) is not None:
            yield frame

    def bodies(self) -> list[str | None]:
        return [frame.WhichOneof("body") for frame in self.says_all()]


def opened(most: int = 100, **window: int) -> Peer:
    peer = Peer(most, window=window)
    assert peer.says() is not None
    peer.welcome()
    assert peer.bodies() == ["heartbeat"]
    return peer


def positions(tokens: RequestTokens) -> list[tuple[int, int]]:
    found = [step.rows.row(place) for step, place in tokens.waiting]
    return [(row.position, row.token_ids.size) for row in found]


def code_of(tokens: RequestTokens) -> int:
    assert tokens.error is not None
    return tokens.error.code
