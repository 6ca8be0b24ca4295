"""Clients: nothing is lost when a client comes back or another takes its place; what becomes of those that do not."""

import pytest

from tests.in_process.bench import Bench
from tests.in_process.builders import generate_of
from tests.processor.serving import places, resume, serving
from tokenbus.bus import Outcome
from tokenbus.testing import RowShape, row_shapes
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Ended
from tokenbus_contracts.generated.request_pb2 import ErrorCode
from tokenbus_contracts.generated.stream_pb2 import Goodbye, GoodbyeReason, RefusalReason

FINISHED = RowStatus.FINISHED_LENGTH
HELLO_FIRST = RefusalReason.REFUSAL_REASON_HELLO_FIRST
SLOW = ErrorCode.ERROR_CODE_SLOW_CLIENT


def test_client_of_a_restarted_processor_goes_on_where_it_was() -> None:
    bench = Bench()
    worker, client = bench.worker(request_ids=[1, 2], first_sequence=5, next_sequence=7), bench.client()
    worker.sequence = 4
    for position in (6, 8):
        worker.publish(row_shapes([1, 2], position=position, tokens=2))
    bench.put_off()
    resume(client, 1, 6)
    resume(client, 2, 7)
    assert client.outputs() == []
    bench.run_soon()
    outputs = client.outputs()
    assert [sorted(heard.batches[0].request_ids.tolist()) for heard in outputs] == [[1, 2], [1, 2]]
    assert [heard.batches[0].positions.tolist() for heard in outputs] == [[6, 7], [8, 8]]
    worker.publish(row_shapes([1, 2], position=10))
    assert len(places(client)) == 2
    bench.advance(0.0)
    assert "ack" not in worker.heard_bodies()
    client.ack()
    bench.advance(0.0)
    assert [frame.ack.through_sequence for frame in worker.heard() if frame.HasField("ack")] == [7]


def test_resumed_request_that_ended_meanwhile_is_told_and_forgotten() -> None:
    bench, worker, client = serving()
    worker.publish([RowShape(8, 0, 1), RowShape(9, 0, 2, FINISHED)])
    request = bench.core.registry.table.get(8)
    assert request is not None
    bench.core.registry.fail(request, ErrorCode.ERROR_CODE_ENGINE, "broke")
    client.heard()
    for key in (8, 9):
        resume(client, key, 0)
    heard = client.heard()
    assert [each.body for each in heard] == ["outputs", "error", "outputs"]
    assert heard[1].frame.error.request_id == 8
    assert bench.core.registry.table.of_route(bench.core.clients.sessions[5].route) == []
    client.ack()  # before that, the same request again would be the one that is on its way
    client.ask(generate_of(9))
    worker.publish([RowShape(9, 0, 1)])
    assert places(client) == [(9, 0, 1)]


def test_key_is_used_again_before_the_last_row_is_acknowledged() -> None:
    _, worker, client = serving(1)
    worker.heard()
    worker.publish([RowShape(1, 0, 3, FINISHED)])
    client.heard()
    client.ask(generate_of(1))
    assert "generate" in worker.heard_bodies()
    worker.publish([RowShape(1, 0, 2, FINISHED)])
    client.reconnect()
    client.ask(generate_of(1))
    assert "generate" not in worker.heard_bodies()
    assert places(client) == [(1, 0, 3), (1, 0, 2)]


def test_what_ended_and_was_taken_cannot_be_had_again() -> None:
    _, worker, client = serving(1)
    worker.publish([RowShape(1, 0, 3, FINISHED)])
    client.heard()
    client.ack()
    resume(client, 1, 0)
    (heard,) = client.heard()
    error = heard.frame.error
    assert (error.code, error.emitted_tokens) == (ErrorCode.ERROR_CODE_UNKNOWN_REQUEST, 3)


@pytest.mark.parametrize("is_said_first", [False, True])
def test_what_has_ended_at_its_client_holds_up_nothing(*, is_said_first: bool) -> None:
    bench = Bench()
    worker, client = bench.worker(next_sequence=3), bench.client()
    worker.sequence = 0  # it sends again what it retained
    if is_said_first:
        client.say(ClientFrame(ended=Ended(request_ids=[1])))
    worker.publish([RowShape(1, 0, 3)])
    worker.publish([RowShape(1, 3, 1, FINISHED)])
    if not is_said_first:
        client.say(ClientFrame(ended=Ended(request_ids=[1])))
    bench.advance(0.1)
    assert max(frame.ack.through_sequence for frame in worker.heard() if frame.HasField("ack")) == 2
    assert bench.core.registry.counts.unclaimed == 0
    worker.publish([RowShape(1, 0, 1)])  # the key is free again
    resume(client, 1, 0)
    assert places(client) == [(1, 0, 1)]


@pytest.mark.parametrize(("position", "expected"), [(1, [(1, 1, 1), (1, 2, 1)]), (2, [(1, 2, 1)])])
def test_other_client_takes_over_what_was_not_acknowledged(position: int, expected: list[tuple[int, int, int]]) -> None:
    bench, worker, client = serving(1)
    for place in range(3):
        worker.publish(row_shapes([1], position=place))
    client.heard()
    client.ack(1)
    bench.outcomes[client.peer] = Outcome.GONE
    other = bench.client(6)
    resume(other, 1, position)
    assert places(other) == expected
    worker.publish(row_shapes([1], position=3))
    assert places(other) == [(1, 3, 1)]
    client.ack(1)
    client.reconnect()
    assert client.errors() == {1: ErrorCode.ERROR_CODE_TAKEN_UP}
    bench.outcomes[other.peer] = Outcome.GONE
    third = bench.client(7)
    resume(third, 1, 0)  # it lacks what was acknowledged (case 21)
    (error,) = [heard.frame.error for heard in third.heard() if heard.body == "error"]
    assert error.code == ErrorCode.ERROR_CODE_GAP
    assert error.message == "tokens 0 to 0 were acknowledged before and are not kept"


def test_client_that_is_silent_is_waited_for() -> None:
    bench, worker, client = serving(1)
    worker.publish(row_shapes([1]))
    bench.pass_time(3.0, worker)
    assert bench.core.clients.sessions[5].peer is not None
    bench.pass_time(0.5, worker)
    assert bench.core.clients.sessions[5].peer is None
    bench.pass_time(9.4, worker)
    assert len(bench.core.registry.table) == 1
    worker.heard()
    bench.pass_time(1.0, worker, most=0.2)
    assert bench.core.clients.sessions == {}
    assert len(bench.core.registry.table) == 0
    told = worker.heard()
    assert [frame.abort.request_id for frame in told if frame.HasField("abort")] == [1]
    assert [frame.ack.through_sequence for frame in told if frame.HasField("ack")][-1] == 1
    client.beat()
    assert client.heard()[-1].frame.refusal.reason == HELLO_FIRST


def test_client_that_leaves_takes_its_requests_with_it() -> None:
    bench, worker, client = serving(1)
    worker.heard()
    client.say(ClientFrame(goodbye=Goodbye(reason=GoodbyeReason.GOODBYE_REASON_STOPPED)))
    assert [frame.abort.request_id for frame in worker.heard()] == [1]
    assert not bench.core.registry.consumers


@pytest.mark.parametrize("is_sent", [False, True])
def test_slow_client_loses_its_requests_and_is_told(*, is_sent: bool) -> None:
    bench, worker, client = serving(clients__send_queue_frames=2)
    client.reconnect(window_frames=2 if is_sent else 1)
    for key in (1, 2, 3):
        client.ask(generate_of(key))
    client.heard()
    worker.publish([RowShape(1, 0, 1), RowShape(2, 0, 1, FINISHED), RowShape(3, 0, 1)])
    for position in (1, 2):
        worker.publish(row_shapes([1, 3], position=position))
    told = client.errors()
    client.ack()
    client.reconnect()
    assert told | client.errors() == {1: SLOW, 2: SLOW, 3: SLOW}
    bench.advance(0.0)
    assert [frame.ack.through_sequence for frame in worker.heard() if frame.HasField("ack")][-1] == 3


def test_closing_sends_what_can_be_sent_and_says_goodbye() -> None:
    bench, worker, client = serving(1)
    client.heard()
    bench.outcomes[client.peer] = Outcome.FULL
    worker.publish(row_shapes([1]))
    bench.outcomes.clear()
    bench.core.clients.close(GoodbyeReason.GOODBYE_REASON_RESTARTING, "bye")
    assert [heard.body for heard in client.heard()] == ["outputs", "goodbye"]


def test_welcome_that_finds_no_room_begins_no_connection() -> None:
    bench, worker, client = serving(1)
    worker.publish(row_shapes([1]))
    assert places(client) == [(1, 0, 1)]
    client.ack()
    worker.publish(row_shapes([1], position=1))
    bench.outcomes[client.peer] = Outcome.FULL
    client.say_hello()
    bench.outcomes.clear()
    client.heard()
    client.beat()
    assert [heard.frame.refusal.reason for heard in client.heard()] == [HELLO_FIRST]
    client.say_hello()
    welcome, outputs = client.heard()
    assert (welcome.body, outputs.body, outputs.frame.number) == ("welcome", "outputs", 1)
    assert outputs.batches[0].positions.tolist() == [1]


def test_client_whose_first_welcome_was_lost_is_new() -> None:
    bench = Bench()
    bench.outcomes[b"client-5"] = Outcome.FULL
    client = bench.client(5)
    bench.outcomes.clear()
    client.say_hello()
    assert [heard.frame.welcome.resumed for heard in client.heard()] == [False]
    client.say_hello()
    assert [heard.frame.welcome.resumed for heard in client.heard()] == [True]
