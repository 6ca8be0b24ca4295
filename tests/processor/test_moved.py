"""Workers that go from one processor to another, and clients of several, as one processor sees them."""

from typing import Any

import pytest

from tests.in_process.bench import Bench, BenchClient, BenchWorker
from tests.in_process.builders import generate_of, settings
from tests.processor.serving import places, resume
from tokenbus.processor import Processor
from tokenbus.settings import SettingsError
from tokenbus.testing import RowShape, row_shapes
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Ended
from tokenbus_contracts.generated.request_pb2 import ErrorCode
from tokenbus_contracts.generated.stream_pb2 import Goodbye, GoodbyeReason, RefusalReason, WorkerFrame, WorkerRole

LOST, UNKNOWN = ErrorCode.ERROR_CODE_WORKER_LOST, ErrorCode.ERROR_CODE_UNKNOWN_REQUEST
SLOW = ErrorCode.ERROR_CODE_SLOW_CLIENT


def test_worker_comes_back_as_a_fresh_stream_with_what_another_acknowledged_missing() -> None:
    bench = Bench()
    worker, client = bench.worker(processors=1, max_requests=9), bench.client()
    client.ask(generate_of(1))
    worker.admit(1)
    worker.publish(row_shapes([1]))
    client.heard()
    worker.heard()
    worker.say_hello(processors=3, first_sequence=6, next_sequence=6, request_keys=[1])
    assert client.errors() == {1: LOST}
    assert worker.heard_bodies()[0] == "welcome"
    resume(client, 1, 4, only_if_here=True)
    worker.publish(row_shapes([1], position=4, tokens=1, status=RowStatus.FINISHED_LENGTH))
    assert [heard.batches[0].positions.tolist() for heard in client.outputs()] == [[4]]
    assert "abort" not in worker.heard_bodies()


def test_client_hears_which_workers_are_here_before_it_hears_that_none_has_its_request() -> None:
    bench = Bench()
    worker, client = bench.worker(processors=1, max_requests=9), bench.client(wants_room=True)
    assert [len(heard.frame.room.workers) for heard in client.heard() if heard.body == "room"] == [1]
    worker.say(WorkerFrame(goodbye=Goodbye(reason=GoodbyeReason.GOODBYE_REASON_MOVED)))
    bench.advance(0.01)
    resume(client, 1, 0, only_if_here=True)
    room, error = client.heard()
    assert (room.body, len(room.frame.room.workers)) == ("room", 0)
    assert (error.body, error.frame.error.code) == ("error", UNKNOWN)


def test_request_that_ended_while_its_worker_had_no_processor_is_found_by_its_rows() -> None:
    bench = Bench()
    client = bench.client()
    worker = bench.worker(processors=2, first_sequence=3, next_sequence=5, request_keys=[])
    for key in (1, 2):
        resume(client, key, 4, only_if_here=True)
    bench.advance(0.1)
    assert client.errors() == {}
    worker.sequence = 2
    worker.publish(row_shapes([1], position=2, tokens=4))
    worker.publish(row_shapes([1], position=6, tokens=1, status=RowStatus.FINISHED_LENGTH))
    assert [heard.batches[0].positions.tolist() for heard in client.outputs()] == [[4], [6]]
    bench.advance(0.1)
    assert client.errors() == {2: UNKNOWN}
    other = bench.worker("worker-1", processors=2, first_sequence=3, next_sequence=3, request_keys=[2])
    assert "abort" not in other.heard_bodies()
    resume(client, 2, 4, only_if_here=True)
    other.publish(row_shapes([2], position=4, tokens=1))
    assert [heard.batches[0].positions.tolist() for heard in client.outputs()] == [[4]]


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


def test_decode_worker_that_moves_ends_nothing_that_its_client_has_not_claimed_here() -> None:
    bench = Bench()
    prefill = bench.worker("prefill", processors=2, role=WorkerRole.WORKER_ROLE_PREFILL, next_sequence=2)
    prefill.sequence = 0
    prefill.publish(row_shapes([1], tokens=1, status=RowStatus.HANDED_OFF))
    said: dict[str, Any] = {"role": WorkerRole.WORKER_ROLE_DECODE, "request_keys": [1]}
    said |= {"first_sequence": 9, "next_sequence": 9}
    decode = bench.worker("decode", processors=2, **said)
    decode.say_hello(processors=3, **said)
    assert "abort" not in decode.heard_bodies()
    client = bench.client(wants_room=True)
    resume(client, 1, 40, only_if_here=True)
    decode.sequence = 8
    decode.publish(row_shapes([1], position=40, tokens=2))
    assert bench.core.registry.counts.failed == {}
    assert places(client)[-1] == (1, 40, 2)


def _found_here() -> tuple[Bench, BenchWorker, BenchClient]:
    """Return a worker that came from another processor, and the client that found its request there at its token 2."""
    bench = Bench()
    worker, client = bench.worker(processors=2, request_keys=[1]), bench.client()
    resume(client, 1, 2, only_if_here=True)
    worker.publish(row_shapes([1], position=2, tokens=1))
    assert places(client) == [(1, 2, 1)]
    return bench, worker, client


def test_row_behind_those_that_another_processor_had_is_where_a_request_goes_on() -> None:
    bench, worker, client = _found_here()
    for position in (5, 5, 6):
        worker.publish(row_shapes([1], position=position, tokens=1))
    assert places(client) == [(1, 5, 1), (1, 6, 1)]
    assert bench.core.registry.router.counts.repeated == 1
    worker.publish(row_shapes([1], position=8, tokens=1, status=RowStatus.FINISHED_LENGTH))
    assert places(client) == [(1, 8, 1)]


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
    moving = bench.worker("moving", processors=1, max_requests=1, model="m")
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
    moving.say_hello(processors=3)
    assert moving.refusals() == [RefusalReason.REFUSAL_REASON_TOO_MANY_WORKERS]


@pytest.mark.parametrize("key", ["workers_address", "clients_address"])
def test_processor_listens_at_one_address(key: str) -> None:
    chosen = settings({f"bus.{key}": "memory://a,memory://b"})
    with pytest.raises(SettingsError) as refused:
        Processor(chosen)
    limit = "one address for a processor, which listens there"
    assert str(refused.value) == f"bus.{key}: {limit}, got 'memory://a,memory://b'"


def test_what_was_dropped_as_a_slow_clients_is_had_where_its_worker_sends_it_again() -> None:
    """The worker may have left before, which a processor that stood still learns too late, and its rows are not lost.

    To a client of several processors the request went on elsewhere: it wants what comes again.
    """
    bench = Bench({"clients.send_queue_frames": 1})
    worker, client = bench.worker(processors=1, max_requests=9), bench.client(wants_room=True)
    for key in (1, 2):
        client.ask(generate_of(key))
        worker.admit(key)
    client.heard()
    worker.publish([RowShape(1, 0, 1, RowStatus.FINISHED_LENGTH), RowShape(2, 0, 1)])
    for position in (1, 2):
        worker.publish(row_shapes([2], position=position, tokens=1))
    assert client.errors() == {1: SLOW, 2: SLOW}
    client.ack()
    worker.say_hello(processors=3, next_sequence=4, request_keys=[2])
    worker.sequence = 0
    for key in (1, 2):
        resume(client, key, 0, only_if_here=True)
    worker.publish([RowShape(1, 0, 1, RowStatus.FINISHED_LENGTH), RowShape(2, 0, 1)], step=3)
    assert places(client) == [(1, 0, 1), (2, 0, 1)]
