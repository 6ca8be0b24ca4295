"""ClientConnections: requests in, their tokens out."""

import pytest

from tests.in_process.builders import generate_of
from tests.processor.serving import places, serving
from tokenbus.testing import RowShape, row_shapes
from tokenbus_contracts import BatchKind
from tokenbus_contracts.frames import read_frame
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Confirm, ServerFrame
from tokenbus_contracts.generated.request_pb2 import Abort, ErrorCode, SamplingParameters
from tokenbus_contracts.generated.stream_pb2 import RefusalReason

HELLO_FIRST = RefusalReason.REFUSAL_REASON_HELLO_FIRST


def test_one_too_many_is_refused_unless_another_is_idle() -> None:
    bench, _, client = serving(1, clients__max_clients=2)
    client.heard()
    idle = bench.client(6)
    newcomer = bench.client(7)
    assert newcomer.heard()[0].body == "welcome"
    assert bench.peers.cut == [idle.peer]
    idle.beat()
    assert idle.heard()[-1].frame.refusal.reason == HELLO_FIRST
    newcomer.ask(generate_of(2))
    assert bench.client(8).heard()[0].frame.refusal.message == "clients: at most 2"
    client.reconnect()
    assert client.heard()[0].frame.welcome.resumed


def test_request_that_an_earlier_processor_had_handed_out_is_taken_up() -> None:
    bench, worker, client = serving()
    worker.say_hello(request_ids=[9], next_sequence=2)
    worker.sequence = 0
    worker.publish([RowShape(9, 0, 2)])
    worker.heard()
    client.ask(generate_of(9))
    worker.publish([RowShape(9, 2, 1)])
    assert places(client) == [(9, 0, 2), (9, 2, 1)]
    assert "generate" not in worker.heard_bodies()
    assert len(bench.core.registry.table) == 1


def test_refused_request_is_answered() -> None:
    bench, worker, client = serving()
    client.ask(generate_of(1, sampling=SamplingParameters(top_p=0.0)))
    assert client.errors() == {1: ErrorCode.ERROR_CODE_INVALID_REQUEST}
    client.ask(generate_of(1))
    worker.publish(row_shapes([1]))
    assert places(client) == [(1, 0, 1)]
    bench.core.clients.is_draining = True
    client.ask(generate_of(2))
    assert client.errors() == {2: ErrorCode.ERROR_CODE_OVERLOADED}


@pytest.mark.parametrize(
    ("frame", "key"),
    [
        (ClientFrame(generate=generate_of(8, top_logprobs=500)), 8),
        (ClientFrame(confirm=Confirm(through_number=5)), 0),
        (ClientFrame(abort=Abort()), 0),
    ],
)
def test_frame_that_breaks_its_bounds_is_answered_and_ends_nothing_else(frame: ClientFrame, key: int) -> None:
    bench, worker, client = serving(1)
    client.heard()
    bench.core.clients.receive(client.peer, [frame.SerializeToString()], bench.clock.now())
    assert client.errors() == {key: ErrorCode.ERROR_CODE_INVALID_REQUEST}
    worker.publish(row_shapes([1]))
    assert places(client) == [(1, 0, 1)]
    assert bench.core.clients.refused == 1


@pytest.mark.parametrize("parts", [[], [b"\xff"], [b"", b""]])
def test_nonsense_is_refused(parts: list[bytes]) -> None:
    bench, _, client = serving(1)
    client.heard()
    for peer in (client.peer, b"stranger"):
        bench.core.clients.receive(peer, parts, bench.clock.now())
    assert client.errors() == {0: ErrorCode.ERROR_CODE_INVALID_REQUEST}
    (message,) = bench.sent[b"stranger"]
    assert read_frame(ServerFrame, message[0]).refusal.reason == RefusalReason.REFUSAL_REASON_PROTOCOL


def test_drafts_go_to_those_who_want_them() -> None:
    """Of a step with drafts, each client gets those of its requests that asked for them (case 4)."""
    bench, worker, client = serving(1)
    client.ask(generate_of(2, include_draft_logprobs=True))
    client.heard()
    worker.publish(row_shapes([2, 1]), step=1, draft_follows=True)
    worker.publish(row_shapes([2, 1]), step=1, kind=BatchKind.DRAFT)
    (heard,) = client.outputs()
    target, draft = heard.batches
    assert sorted(target.request_ids.tolist()) == [1, 2]
    assert draft.request_ids.tolist() == [2]
    assert bench.core.intake.router.counts.delivered == 2
