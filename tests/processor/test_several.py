"""One processor of several: how much room it has, and how it lets go of its workers and requests."""

import pytest

from tests.in_process.bench import Bench
from tests.in_process.builders import generate_of, settings
from tokenbus.processor import Processor
from tokenbus.settings import SettingsError
from tokenbus.testing import RowShape, row_shapes
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Ended
from tokenbus_contracts.generated.request_pb2 import ContinuationPolicy, SamplingParameters
from tokenbus_contracts.generated.stream_pb2 import GoodbyeReason, RefusalReason

ANY, SAME_WEIGHTS = 0, ContinuationPolicy.CONTINUATION_POLICY_SAME_WEIGHTS


def test_request_that_has_ended_at_its_client_is_ended_here() -> None:
    bench = Bench()
    worker, client = bench.worker(max_requests=1), bench.client(wants_room=True)
    client.ask(generate_of(1))
    client.ask(generate_of(2))
    worker.heard()
    client.say(ClientFrame(ended=Ended(request_ids=[1, 2])))
    assert [frame.abort.request_id for frame in worker.heard() if frame.HasField("abort")] == [1]
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
    told = [[heard.frame.room for heard in client.heard() if heard.body == "room"] for client in clients]
    assert {each[-1].models[0].workers for each in told} == {100}
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
    client.ask(generate_of(1, model="n"))
    bench.advance(0.1)
    assert [heard.body for heard in client.heard()] == []
    bench.advance(1.0)
    (room,) = [heard.frame.room for heard in client.heard() if heard.body == "room"]
    assert {each.model: each.free_requests for each in room.models} == {"m": 5, "n": 0}
    assert "room" not in {heard.body for heard in other.heard()}


@pytest.mark.parametrize("wants_room", [True, False])
def test_processor_that_drains_lets_its_clients_continue_elsewhere(*, wants_room: bool) -> None:
    """They hear an error behind the last row; requests that no engine may be able to continue finish first."""
    bench = Bench()
    worker, client = bench.worker(processors=2, continues_requests=True), bench.client(wants_room=wants_room)
    penalized = SamplingParameters(max_tokens=4, presence_penalty=0.5)
    client.ask(generate_of(1, continuation_policy=ANY))
    client.ask(generate_of(2))
    client.ask(generate_of(3, continuation_policy=ANY, sampling=penalized))
    client.ask(generate_of(4, continuation_policy=SAME_WEIGHTS))
    for key in (1, 2, 3, 4):
        worker.admit(key)
    worker.publish(row_shapes([1, 2, 3, 4]))
    bench.core.drain()
    heard = [each for each in client.heard() if each.body in ("outputs", "error")]
    let_go = [1] if wants_room else []
    assert heard[0].body == "outputs"
    assert [each.frame.error.request_id for each in heard[1:]] == let_go
    assert [frame.abort.request_id for frame in worker.heard() if frame.HasField("abort")] == let_go
    worker.publish(row_shapes([2, 3, 4], position=4, tokens=1, status=RowStatus.FINISHED_LENGTH))
    bench.advance(0.1)
    assert ("goodbye" in worker.heard_bodies()) == wants_room


def test_worker_whose_engine_cannot_continue_requests_keeps_those_it_has_begun() -> None:
    bench = Bench()
    worker, client = bench.worker(processors=2), bench.client(wants_room=True)
    for key in (1, 2):
        client.ask(generate_of(key, continuation_policy=ANY))
    worker.admit(1)
    bench.core.drain()
    assert list(client.errors()) == [2]


def test_processor_that_drains_sends_away_the_workers_that_know_another() -> None:
    """As soon as they have no requests; others finish what they have."""
    bench = Bench()
    free, busy = bench.worker("free", processors=2, model="f"), bench.worker("busy", processors=2, model="b")
    staying = bench.worker("staying", model="s")
    bench.client().ask(generate_of(1, model="b"))
    bench.core.drain()
    assert free.heard()[-1].goodbye.reason == GoodbyeReason.GOODBYE_REASON_RESTARTING
    assert set(bench.core.workers.by_id) == {"busy", "staying"}
    free.say_hello(processors=2)
    assert free.refusals() == [RefusalReason.REFUSAL_REASON_TOO_MANY_WORKERS]
    busy.say_hello(processors=2, request_ids=[1])
    busy.publish(row_shapes([1], status=RowStatus.FINISHED_LENGTH))
    bench.advance(0.1)
    assert busy.heard_bodies()[-1] == "goodbye"
    assert "goodbye" not in staying.heard_bodies()


@pytest.mark.parametrize("key", ["workers_address", "clients_address"])
def test_processor_listens_at_one_address(key: str) -> None:
    chosen = settings({f"bus.{key}": "memory://a,memory://b"})
    with pytest.raises(SettingsError) as refused:
        Processor(chosen)
    limit = "one address, at which the processor listens"
    assert str(refused.value) == f"bus.{key}: {limit}, got 'memory://a,memory://b'"
