"""Publisher: what becomes of a batch, where there is room for it and where there is none."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest

from tests.in_process.builders import BATCH, EPOCH, EVENT, generate_of, settings, values_by_key
from tests.worker.peer import welcome_of
from tokenbus.testing import RowShape, batch, row_shapes
from tokenbus.worker import NotRunningError, Publisher, PublishError, RetentionFullError
from tokenbus.worker.retention import Dropped, Retained
from tokenbus_contracts import ContractError, RowStatus, Scoring, decode
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.control_pb2 import ControlAnswer, EngineState
from tokenbus_contracts.generated.request_pb2 import Continuation, ErrorCode, RequestEvent
from tokenbus_contracts.generated.stream_pb2 import Ack, ProcessorFrame

LEAVING = (
    RowStatus.FINISHED_STOP,
    RowStatus.FINISHED_LENGTH,
    RowStatus.ABORTED,
    RowStatus.UNRECOVERABLE,
    RowStatus.HANDED_OFF,
)


class Bare(Publisher):
    """A publisher that runs without a link: the test is its processor."""

    def __init__(self, addresses: str = "memory://a", **worker: object) -> None:
        overrides = {f"worker.{name}": value for name, value in worker.items()}
        super().__init__(settings({"bus.workers_address": addresses} | overrides), epoch=EPOCH)
        self.begin()

    def hear(self, **body: Any) -> None:  # noqa: ANN401 - as the frame has it
        with self._room:
            self.session.receive([write_frame(ProcessorFrame(**body))], 0.0)

    def abandon(self) -> None:
        self.session.move(0.0)
        self.connect()

    def connect(self) -> None:
        self.session.next_message(0.0)
        self.hear(welcome=welcome_of())

    def kept(self, sequence: int) -> Retained:
        entry = self.retention.find(sequence)
        assert isinstance(entry, Retained)
        return entry

    def waits(self) -> bool:
        with self._room:
            return bool(self._room._waiters)  # type: ignore[attr-defined]


def full(**worker: Any) -> Bare:  # noqa: ANN401 - settings
    publisher = Bare(retention_items=2, **worker)
    publisher.publish(batch(row_shapes([1])))
    return publisher


def until_it_waits(publisher: Bare) -> None:
    nudge = threading.Event()
    while not publisher.waits():
        nudge.wait(0.001)


def test_batch_is_published_under_this_stream() -> None:
    publisher = Bare(id="mine", dp_rank=3)
    made = batch(row_shapes([5, 3], tokens=2), step=9, sequence=77, worker_id="other", epoch=1)
    assert publisher.publish(made) == 1
    item = publisher.kept(1)
    header = decode(item.payload).header
    assert (header.worker_id, header.epoch, header.sequence, header.dp_rank) == ("mine", EPOCH, 1, 3)
    assert (header.step, header.tp_rank, item.kind) == (9, 0, BATCH)
    assert header.produced_at_ns > 0
    assert values_by_key(decode(item.payload)) == values_by_key(made)


def test_other_ranks_publish_nothing() -> None:
    """Only tensor-parallel rank 0 publishes; the others count, and do whatever else a publisher does (case 6)."""
    first, other = Bare(tp_rank=0), Bare(tp_rank=1)
    assert first.publish(batch(row_shapes([1]))) == 1
    assert other.publish(batch(row_shapes([1]))) == 0
    assert other.admitted(1, 1) == other.failed_request(1, ErrorCode.ERROR_CODE_ENGINE, "broke") == 0
    assert (first.gated, other.gated) == (0, 3)
    assert len(other.retention) == 0


def test_requests_are_known_from_first_to_last_row() -> None:
    publisher = Bare()
    publisher.publish(batch(row_shapes(range(1, 7), tokens=0, status=RowStatus.IDLE)))
    assert publisher.session.requests.keys() == set(range(1, 7))
    leaving = [RowShape(key, 0, 0, status) for key, status in enumerate(LEAVING, 1)]
    publisher.publish(batch([*leaving, RowShape(6, 0, 0, RowStatus.PREEMPTED)], step=2))
    assert publisher.session.requests.keys() == {6}


class Watched(threading.Condition):
    """A lock that calls back each time it is free again: at that moment a hello may be sent."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    def __exit__(self, *error: object) -> None:
        self.release()
        if not self._is_owned():  # type: ignore[attr-defined]
            self._look()


def test_hello_never_tells_of_an_item_without_its_requests() -> None:
    publisher = Bare()
    told: list[tuple[int, set[int]]] = []

    def look() -> None:
        told.append((publisher.retention.next_sequence, set(publisher.session.requests)))

    publisher._room = Watched(look)
    publisher.publish(batch(row_shapes([1, 2])))
    assert told == [(2, {1, 2})]


def test_events_are_items_of_the_stream() -> None:
    publisher = Bare(id="mine")
    publisher.publish(batch(row_shapes([1])))
    assert publisher.admitted(8, prompt_tokens=0) == 2
    assert publisher.failed_request(8, ErrorCode.ERROR_CODE_ENGINE, "broke", 5) == 3
    admitted = read_frame(RequestEvent, publisher.kept(2).payload)
    failed = read_frame(RequestEvent, publisher.kept(3).payload)
    assert publisher.kept(2).kind == publisher.kept(3).kind == EVENT
    assert (admitted.sequence, failed.sequence) == (2, 3)
    assert (admitted.admitted.worker_id, admitted.admitted.epoch) == ("mine", EPOCH)
    assert admitted.admitted.prompt_tokens == 1
    assert (admitted.admitted.first_request_id, admitted.admitted.weight_version) == (0, 0)
    assert (failed.error.request_id, failed.error.code, failed.error.emitted_tokens) == (8, 8, 5)


def test_event_says_which_turn_was_admitted_with_which_weights() -> None:
    publisher = Bare()
    publisher.connect()
    turn = Continuation(token_ids=[4, 5, 6], turn=2, reason=ErrorCode.ERROR_CODE_WORKER_LOST)
    publisher.hear(generate=generate_of(8, first_request_id=7, continuation=turn))
    publisher.publish_event(
        RequestEvent(control_answer=ControlAnswer(control_key=1, state=EngineState(weight_version=9)))
    )
    publisher.admitted(8, prompt_tokens=3)
    admitted = read_frame(RequestEvent, publisher.kept(2).payload).admitted
    assert (admitted.first_request_id, admitted.turn, admitted.first_position) == (7, 2, 3)
    assert (admitted.reason, admitted.weight_version) == (ErrorCode.ERROR_CODE_WORKER_LOST, 9)
    assert publisher.session._introduction.weight_version == 9
    publisher.failed_request(8, ErrorCode.ERROR_CODE_ENGINE, "broke")
    assert not publisher.session.requests


def test_admission_after_a_hand_off_says_where_the_decode_worker_begins() -> None:
    publisher = Bare()
    publisher.connect()
    publisher.hear(generate=generate_of(8, continuation=Continuation(token_ids=[4])))
    publisher.admitted(8, prompt_tokens=3)
    admitted = read_frame(RequestEvent, publisher.kept(1).payload).admitted
    assert (admitted.first_request_id, admitted.turn, admitted.first_position) == (0, 0, 1)


def test_policy_fail_ends_requests_at_once_and_tells_so() -> None:
    """Without room the policy `fail` raises, names the requests, and leaves a gap that names them too (case 20, 21)."""
    publisher = full(policy="fail")
    with pytest.raises(RetentionFullError, match=r"policy fail.*2 items.*2 requests end") as raised:
        publisher.publish(batch(row_shapes([5, 6])))
    assert isinstance(raised.value, PublishError)
    assert raised.value.request_ids == {5, 6}
    assert publisher.failed == 2
    gap = publisher.retention.find(2)
    assert isinstance(gap, Dropped)
    assert gap.request_ids == {5, 6}
    publisher.connect()
    publisher.hear(ack=Ack(through_sequence=2))
    assert publisher.publish(batch(row_shapes([7]))) == 3


def test_batch_without_rows_that_finds_no_room_ends_no_request() -> None:
    publisher = full(policy="fail")
    with pytest.raises(RetentionFullError) as raised:
        publisher.publish(batch([]))
    assert not raised.value.request_ids
    assert publisher.retention.find(2) is None


@pytest.mark.parametrize("policy", ["block", "shed"])
def test_waiting_has_an_end(policy: str) -> None:
    """The policies that wait do so for their time and not forever; then the requests end with an error (case 20)."""
    publisher = full(policy=policy, block_timeout_ms=1)
    with pytest.raises(RetentionFullError, match="waited 1 ms"):
        publisher.publish(batch(row_shapes([5])))
    assert isinstance(publisher.retention.find(2), Dropped)


def test_policy_shed_drops_alternatives_from_the_share_on() -> None:
    """From `shed_at` on, alternatives are dropped and rows marked as shed, but never a token (case 13)."""
    publisher = Bare(policy="shed", retention_items=4, shed_at=0.5)
    made = batch([RowShape(1, 0, 2, top_k=3), RowShape(2, 0, 1), RowShape(3, 0, 2, scoring=Scoring.NONE)])
    for _ in range(3):
        publisher.publish(made)
    before, shed = decode(publisher.kept(2).payload), decode(publisher.kept(3).payload)
    assert values_by_key(before) == values_by_key(made)
    assert publisher.shed == 1
    assert shed.scorings.tolist() == [Scoring.SHED, Scoring.FULL, Scoring.NONE]
    assert shed.top_ks.tolist() == [0, 0, 0]
    for name in ("token_ids", "logprobs", "ranks", "proposal_token_ids", "positions", "statuses"):
        assert shed.columns[name].tolist() == made.columns[name].tolist()
    assert shed.alternative_token_ids.size == shed.alternative_logprobs.size == 0


def test_many_threads_leave_no_hole() -> None:
    publisher, each, threads = Bare(retention_items=10_000), 40, 4

    def publish(key: int) -> list[int]:
        return [publisher.publish(batch(row_shapes([key], position=place))) for place in range(each)]

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(publish, range(1, threads + 1)))
    assert sorted(chain(*found)) == list(range(1, each * threads + 1))
    for key, sequences in enumerate(found, 1):
        assert sequences == sorted(sequences)
        for place, sequence in enumerate(sequences):
            kept = decode(publisher.kept(sequence).payload)
            assert kept.header.sequence == sequence
            assert (kept.request_ids.tolist(), kept.positions.tolist()) == ([key], [place])


def test_order_is_kept_while_waiting_for_room() -> None:
    """Without room the policy `block` waits, and goes on in order when something was acknowledged (case 20)."""
    publisher = full(policy="block")
    publisher.connect()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(publisher.publish, batch(row_shapes([2])))
        until_it_waits(publisher)
        assert not first.done()
        second = pool.submit(publisher.publish, batch(row_shapes([3])))
        list(iter(lambda: publisher.session.next_message(0.0), None))
        publisher.hear(ack=Ack(through_sequence=1))
        assert first.result() == 2
        publisher.session.next_message(0.0)
        publisher.hear(ack=Ack(through_sequence=2))
        assert second.result() == 3
    assert decode(publisher.kept(3).payload).request_ids.tolist() == [3]


def test_waiting_ends_when_the_publisher_is_closed() -> None:
    publisher = full(policy="block")
    with ThreadPoolExecutor(1) as pool:
        waiting: Future[int] = pool.submit(publisher.publish, batch(row_shapes([2])))
        until_it_waits(publisher)
        publisher._close(None)
        with pytest.raises(NotRunningError):
            waiting.result()
    assert publisher.retention.next_sequence == 2


def test_step_of_long_ago_is_refused_where_it_can_be_mended() -> None:
    """A step that a processor would take for a repetition is an error; a refused batch does not move that bound."""
    publisher = Bare()
    publisher.publish(batch(row_shapes([1]), step=30))
    assert publisher.publish(batch(row_shapes([1], position=1), step=30 - 16)) == 2
    with pytest.raises(ContractError, match="at least 14"):
        publisher.publish(batch(row_shapes([1], position=2), step=13))
    broken = batch(row_shapes([1]), step=1000)
    with pytest.raises(ContractError):
        publisher.publish(type(broken).of_views(broken.header, broken.columns | {"ranks": broken.ranks[:0]}))
    assert publisher.publish(batch(row_shapes([1], position=2), step=14)) == 3


def abandoned() -> Bare:
    publisher = Bare(addresses="memory://a,memory://b")
    publisher.connect()
    publisher.hear(generate=generate_of(1))
    publisher.publish(batch(row_shapes([1])))
    publisher.abandon()
    publisher.hear(generate=generate_of(2))
    return publisher


def test_new_epoch_has_nothing_of_requests_that_were_given_up() -> None:
    """The engine hears that it is to end them, and only then of new ones."""
    publisher = abandoned()
    assert publisher.epoch == EPOCH + 1
    assert [type(each).__name__ for each in publisher.take_requests()] == ["Generate", "Abort"]
    assert publisher.admitted(1, 3) == publisher.publish(batch(row_shapes([1], position=4))) == 0
    assert not publisher.take_requests()
    publisher.publish(batch([RowShape(1, 8, 0, RowStatus.ABORTED)]))
    assert len(publisher.retention) == 0
    assert [each.request_id for each in publisher.take_requests()] == [2]
    assert publisher.admitted(2, 3) == 1
    published = publisher.publish(batch(row_shapes([2])))
    header = decode(publisher.kept(published).payload).header
    assert (header.epoch, header.sequence) == (EPOCH + 1, published) == (EPOCH + 1, 2)


@pytest.mark.parametrize(
    "end",
    [
        lambda publisher: publisher.failed_request(1, ErrorCode.ERROR_CODE_ENGINE, "so"),
        lambda publisher: publisher.lose([1]),
        lambda publisher: publisher.lose_all(),
    ],
    ids=["error", "lost", "all lost"],
)
def test_request_that_was_given_up_ends_in_any_way(end: Callable[[Bare], None]) -> None:
    publisher = abandoned()
    publisher.take_requests()
    end(publisher)
    assert [each.request_id for each in publisher.take_requests()] == [2]


def test_batch_that_waits_for_room_while_its_processor_is_abandoned_is_not_published() -> None:
    publisher = Bare(addresses="memory://a,memory://b", retention_items=2, max_requests=0)
    publisher.connect()
    publisher.publish(batch(row_shapes([1])))
    with ThreadPoolExecutor() as threads:
        publishing = threads.submit(publisher.publish, batch(row_shapes([1], position=4)))
        until_it_waits(publisher)
        with publisher._room:
            publisher.abandon()
        assert publishing.result() == 0
    assert len(publisher.retention) == 0


def test_worker_that_takes_no_requests_goes_on_with_its_own() -> None:
    publisher = Bare(addresses="memory://a,memory://b", max_requests=0)
    publisher.connect()
    publisher.publish(batch(row_shapes([1])))
    publisher.abandon()
    assert not publisher.take_requests()
    assert publisher.publish(batch(row_shapes([1], position=4))) == 1


def test_workers_spread_over_processors() -> None:
    """A worker goes through the list in an order of its own, the same after each start."""
    orders = {tuple(Bare(addresses="memory://a,memory://b", id=f"worker-{n}")._addresses) for n in range(16)}
    assert orders == {("memory://a", "memory://b"), ("memory://b", "memory://a")}
