"""Workers that go from one processor to another, and clients of several, as one processor sees them."""

import pytest

from tests.in_process.bench import Bench
from tests.in_process.builders import generate_of, settings
from tokenbus.processor import Processor
from tokenbus.settings import SettingsError
from tokenbus.testing import RowShape
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Ended
from tokenbus_contracts.generated.request_pb2 import ErrorCode
from tokenbus_contracts.generated.stream_pb2 import GoodbyeReason, RefusalReason

LOST, UNKNOWN = ErrorCode.ERROR_CODE_WORKER_LOST, ErrorCode.ERROR_CODE_UNKNOWN_REQUEST
SLOW = ErrorCode.ERROR_CODE_SLOW_CLIENT


def test_request_that_has_ended_at_its_client_is_ended_here() -> None:
    bench = Bench()
    worker, client = bench.worker(max_requests=1), bench.client(wants_room=True)
    client.ask(generate_of(1))
    client.ask(generate_of(2))
    worker.heard()
    client.say(ClientFrame(ended=Ended(request_keys=[1, 2])))
    assert [frame.abort.request_key for frame in worker.heard() if frame.HasField("abort")] == [1]
    worker.publish([RowShape(1, 0, 0, RowStatus.ABORTED)])
    bench.advance(0.1)
    assert "generate" not in worker.heard_bodies()
    assert bench.core.registry.table.open_requests() == []


def test_clients_hear_of_many_workers_at_once() -> None:
    bench = Bench({"processor.max_workers": 100, "clients.max_clients": 1000})
    clients = [bench.client(session, wants_room=True) for session in range(1, 1001)]
    bench.advance(0.5)
    for client in clients:
        client.heard()
    for place in range(100):
        bench.worker(f"worker-{place}")
        bench.advance(0.01)
    bench.pass_time(1.0, *clients, most=0.1)
    told = [[heard.frame.room.arrivals for heard in client.heard() if heard.body == "room"] for client in clients]
    assert {each[-1] for each in told} == {bench.core.workers.arrivals}
    assert max(map(len, told)) <= 8  # and not 100


def test_client_is_told_how_much_room_there_is() -> None:
    """By model, when it connects, when a worker comes, and with heartbeats when it changed; others are told nothing."""
    bench = Bench()
    bench.worker("a", model="m", max_requests=3)
    bench.worker("b", model="m", max_requests=2)
    bench.worker("c", model="n", max_requests=1)
    client, other = bench.client(wants_room=True), bench.client(6)
    told = [heard.frame.room for heard in client.heard() if heard.body == "room"]
    assert [{each.model: each.free_requests for each in room.models} for room in told] == [{"m": 5, "n": 1}]
    assert len(set(told[0].workers)) == 3
    client.ask(generate_of(1, model="n"))
    bench.advance(0.1)
    assert [heard.body for heard in client.heard()] == []
    bench.advance(1.0)
    (room,) = [heard.frame.room for heard in client.heard() if heard.body == "room"]
    assert {each.model: each.free_requests for each in room.models} == {"m": 5, "n": 0}
    assert "room" not in {heard.body for heard in other.heard()}


def test_processor_that_ends_sends_away_the_workers_that_know_another() -> None:
    """They hear a goodbye and their requests' clients an error that sends them on; others finish what they have."""
    bench = Bench()
    moving = bench.worker("moving", processors=2, max_requests=1, model="m")
    staying = bench.worker("staying", max_requests=1, model="s")
    client = bench.client()
    client.ask(generate_of(1, model="m"))
    client.ask(generate_of(2, model="s"))
    bench.core.worker_connections.is_draining = True
    bench.core.worker_connections.send_away(bench.core.workers.by_id.values(), "the processor is closing")
    assert client.errors() == {1: LOST}
    assert moving.heard()[-1].goodbye.reason == GoodbyeReason.GOODBYE_REASON_RESTARTING
    assert "goodbye" not in staying.heard_bodies()
    assert set(bench.core.workers.by_id) == {"staying"}
    moving.say_hello(processors=2)
    assert moving.refusals() == [RefusalReason.REFUSAL_REASON_TOO_MANY_WORKERS]


@pytest.mark.parametrize("key", ["workers_address", "clients_address"])
def test_processor_listens_at_one_address(key: str) -> None:
    chosen = settings({f"bus.{key}": "memory://a,memory://b"})
    with pytest.raises(SettingsError) as refused:
        Processor(chosen)
    limit = "one address for a processor, which listens there"
    assert str(refused.value) == f"bus.{key}: {limit}, got 'memory://a,memory://b'"
