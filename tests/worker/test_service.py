"""serve: an engine's loop goes on whatever happens to one batch or one request."""

import threading
from collections.abc import Callable

import pytest

from tests.in_process.builders import generate_of
from tests.worker.looped import Engine, Once, batches, events, keys, running
from tokenbus.testing import RowShape, batch, row_shapes
from tokenbus.worker import Publisher
from tokenbus.worker.engine_loop import EngineLoop
from tokenbus.worker.engine_publisher import EnginePublisher
from tokenbus.worker.retention import Dropped
from tokenbus_contracts import LogprobBatch, RowStatus
from tokenbus_contracts.generated.request_pb2 import Abort, ErrorCode, Generate


def serve(publisher: Publisher, engine: Engine, stop: threading.Event, pace: Callable[[], None] | None = None) -> None:
    EngineLoop(engine, EnginePublisher(publisher, engine.vocabulary_size)).serve(stop, pace)


def broken(made: LogprobBatch, token: int = 0) -> LogprobBatch:
    logprobs = made.logprobs.copy()
    logprobs[token] = float("nan")
    return type(made).of_views(made.header, made.columns | {"logprobs": logprobs})


def test_requests_are_admitted_in_order_and_aborts_passed_on() -> None:
    publisher = running(requests=[generate_of(8), Abort(request_id=4), generate_of(9)])
    engine = Engine([batch(row_shapes([8]))])
    serve(publisher, engine, Once())
    assert (engine.admitted, engine.aborted) == ([8, 9], [4])
    told = [(event.admitted.request_id, event.admitted.prompt_tokens) for event in events(publisher)]
    assert told == [(8, 3), (9, 3)]
    assert keys(publisher) == [[8]]


def test_batch_without_room_ends_its_own_requests_alone() -> None:
    """Requests of a batch without room are ended in the engine; the step's other batches still go out (case 21)."""
    publisher = running(items=2)
    small = [RowShape(1, 0, 0, RowStatus.IDLE)]
    engine = Engine([batch(small), batch(row_shapes([2, 3]))], [batch(small, step=2)])
    serve(publisher, engine, Once(2))
    assert engine.aborted == [2, 3, 1]
    assert keys(publisher) == [[1]]
    gap = publisher.retention.find(2)
    assert isinstance(gap, Dropped)
    assert gap.request_ids == {1, 2, 3}


def test_row_that_breaks_the_contract_ends_its_own_request_alone() -> None:
    """NaN in a row ends that row's request with an error, in the engine too, and its neighbours go on (case 24)."""
    publisher = running()
    engine = Engine([broken(batch(row_shapes([2, 3, 4])), 1)], [batch(row_shapes([2, 4], position=1), step=2)])
    serve(publisher, engine, Once(2))
    assert engine.aborted == [3]
    (event,) = events(publisher)
    assert (event.error.request_id, event.error.code) == (3, ErrorCode.ERROR_CODE_ENGINE)
    assert "logprobs[0]: a finite number" in event.error.message
    assert keys(publisher) == [[2, 4, 3], [2, 4]]
    (first, _) = batches(publisher)
    assert first.statuses.tolist() == [RowStatus.ACTIVE, RowStatus.ACTIVE, RowStatus.IDLE]
    assert first.batch_indices.tolist() == [0, 2, 1]


def test_step_that_contradicts_itself_ends_its_requests() -> None:
    """The rows of a step whose arrays differ in length cannot be assigned: all of its requests end (case 1)."""
    publisher = running()
    whole = batch(row_shapes([2, 3]))
    torn = type(whole).of_views(whole.header, whole.columns | {"batch_indices": whole.batch_indices[:1]})
    engine = Engine([torn, batch(row_shapes([4]), step=2)])
    serve(publisher, engine, Once())
    assert engine.aborted == [2, 3]
    assert all("index_to_batch_id: 2 elements" in event.error.message for event in events(publisher))
    assert keys(publisher) == [[4]]


def test_step_that_raises_ends_what_the_engine_had() -> None:
    publisher = running(requests=[generate_of(8), generate_of(9)])
    done = [RowShape(9, 0, 1, RowStatus.FINISHED_STOP)]
    engine = Engine(
        [batch(row_shapes([8])), batch(done, step=2)], OSError("no memory"), [batch(row_shapes([7]), step=3)]
    )
    serve(publisher, engine, Once(3))
    assert engine.aborted == [8]
    ended = [event.error for event in events(publisher) if event.HasField("error")]
    assert [(error.request_id, error.code) for error in ended] == [(8, ErrorCode.ERROR_CODE_ENGINE)]
    assert ended[0].message == "the engine failed: OSError: no memory"
    assert keys(publisher) == [[8], [9], [7]]
    assert publisher.counts.failed_steps == 1


def test_news_without_room_end_the_request_they_are_of() -> None:
    """A request whose admission or refusal cannot be sent for want of room ends through the gap (case 21)."""
    publisher = running(items=2, requests=[generate_of(8)])
    publisher.publish(batch(row_shapes([1])))
    engine = Engine()
    serve(publisher, engine, Once())
    assert (engine.admitted, engine.aborted) == ([8], [8])
    engine.refusal = ValueError("no")
    publisher.incoming.put(generate_of(9))
    serve(publisher, engine, Once())
    gap = publisher.retention.find(2)
    assert isinstance(gap, Dropped)
    assert gap.request_ids == {8, 9}
    serve(publisher, Engine([broken(batch(row_shapes([5])))]), Once())
    assert publisher.retention.next_sequence == 5


@pytest.mark.parametrize("requests", [[], [generate_of(8)]])
def test_closed_publisher_ends_the_loop(requests: list[Generate | Abort]) -> None:
    publisher = running(requests=requests)
    publisher.end()
    engine = Engine([batch(row_shapes([1]))], [batch(row_shapes([1]))])
    serve(publisher, engine, threading.Event())
    assert publisher.retention.next_sequence == 1


def test_every_rank_does_all_but_publish() -> None:
    """A rank that does not publish admits, computes and aborts like the first one: only its batches stay (case 7)."""
    publisher = running(tp_rank=1, requests=[generate_of(8), Abort(request_id=4)])
    engine = Engine([batch(row_shapes([8])), batch(row_shapes([8]))], [batch(row_shapes([8]), step=2)])
    serve(publisher, engine, Once(2))
    assert (engine.admitted, engine.aborted) == ([8], [4])
    assert not engine.has_work
    assert publisher.gated == 4
    assert len(publisher.retention) == 0


def test_pace_is_kept_before_each_step_and_never_when_idle() -> None:
    paces: list[int] = []
    engine = Engine([batch(row_shapes([1]))], [batch(row_shapes([1]), step=2)])
    pace: Callable[[], None] = lambda: paces.append(len(engine.steps))  # noqa: E731 - typed
    serve(running(requests=[Abort(request_id=1)]), engine, Once(2), pace)
    idle = running(requests=[Abort(request_id=1)])
    serve(idle, Engine(), Once(), pace)
    assert paces == [2, 1]


def test_stop_is_looked_at_before_each_turn() -> None:
    publisher = running(requests=[generate_of(8)])
    stop = threading.Event()
    stop.set()
    engine = Engine([batch(row_shapes([1]))])
    serve(publisher, engine, stop)
    assert engine.has_work
    assert len(publisher.incoming) == 1


def test_zero_keys_end_nobody() -> None:
    publisher = running()
    engine = Engine([batch(row_shapes([0, 3]))])
    EngineLoop(engine, EnginePublisher(publisher, engine.vocabulary_size)).compute()
    assert [event.error.request_id for event in events(publisher)] == [3]
