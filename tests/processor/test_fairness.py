"""Fairness: what a client lets pile up is charged to it alone, and what a worker brings unasked to that worker."""

from collections.abc import Callable

import pytest

from tests.in_process.bench import Bench, BenchClient, BenchWorker
from tests.in_process.builders import generate_of
from tests.processor.serving import places, resume, serving
from tokenbus.bus import Identity, Outcome, Role
from tokenbus.processor import client_frames, send_queue
from tokenbus.processor.requests import UNCLAIMED, Deadline, RequestTable, Source
from tokenbus.testing import RowShape, row_shapes
from tokenbus_contracts import Limits, LogprobBatch, RowStatus, decode
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate

SLOW = ErrorCode.ERROR_CODE_SLOW_CLIENT
FINISHED = RowStatus.FINISHED_LENGTH
OVERLOADED = ErrorCode.ERROR_CODE_OVERLOADED


def hoarding(items: int, **overrides: object) -> tuple[Bench, BenchWorker, BenchClient, BenchClient]:
    """Return a worker whose stream may be held so far, a client that acknowledges nothing, and one that keeps up."""
    bench, worker, hoarder = serving(1, processor__pending_items=items, processor__credit_items=items, **overrides)
    victim = bench.client(6, name="victim")
    victim.ask(generate_of(2))
    worker.heard()
    hoarder.heard()
    return bench, worker, hoarder, victim


def granted(worker: BenchWorker) -> int:
    return worker.known.stream.credit.through_sequence


def test_client_that_acknowledges_nothing_makes_no_other_wait() -> None:
    bench, worker, hoarder, victim = hoarding(32)
    for position in range(200):
        assert granted(worker) > worker.sequence, "the worker waits"
        worker.publish(row_shapes([1, 2], position=position))
        assert places(victim) == [(2, position, 1)]
        victim.ack()
        if position % 8 == 0:
            bench.advance(0.0)
            hoarder.beat()
    assert hoarder.errors() == {1: SLOW}
    assert bench.core.clients.evicted == 1
    assert len(worker.known.stream.acks) <= 32


@pytest.mark.parametrize("comes_back", [True, False])
def test_client_that_is_behind_for_a_moment_is_not_evicted_with_a_hoarder(*, comes_back: bool) -> None:
    """At the bound the hoarder loses its request; the worker waits for one that holds little, but not for long."""
    bench, worker, hoarder, other = hoarding(32)
    for position in range(34):
        worker.publish(row_shapes([1, 2] if position < 4 else [1], position=position))
    assert (hoarder.errors(), other.errors()) == ({1: SLOW}, {})
    while granted(worker) > worker.sequence:
        assert worker.sequence < 100, "the worker does not wait"
        worker.publish(row_shapes([1], position=worker.sequence))
    bench.advance(0.5)
    assert granted(worker) == worker.sequence, "the worker does not wait"
    if comes_back:
        other.ack()
    bench.pass_time(1.0, worker, hoarder, other)
    assert granted(worker) > worker.sequence, "the worker waits"
    assert other.errors() == ({} if comes_back else {2: SLOW})


def test_worker_hears_with_a_clients_ack_what_it_may_forget_and_send() -> None:
    _, worker, client = serving(1, processor__pending_items=400, processor__credit_items=100)
    client.reconnect(window_frames=64)
    worker.heard()
    while granted(worker) > worker.sequence:
        assert worker.sequence < 400, "the worker is never without credit"
        worker.publish(row_shapes([1], position=worker.sequence))
    worker.heard()
    for _ in range(worker.sequence):
        if client.outputs():
            client.ack()
    said = worker.heard()
    assert [frame.ack.through_sequence for frame in said if frame.WhichOneof("body") == "ack"][-1] > 150
    assert [frame.credit.through_sequence for frame in said if frame.WhichOneof("body") == "credit"][
        -1
    ] > worker.sequence
    assert client.errors() == {}


def test_all_clients_together_are_bounded() -> None:
    bench, worker, big = serving(1, clients__buffer_bytes=2**21, clients__send_queue_bytes=2**21)
    small = bench.client(6)
    small.ask(generate_of(2))
    big.heard()
    worker.publish(row_shapes([2]))
    assert len(places(small)) == 1
    position = 0
    while bench.core.clients.evicted == 0:
        worker.publish([RowShape(1, position, 8, top_k=20)])
        position += 8
        assert sum(each.send_queue.bytes for each in bench.core.clients.sessions.values()) <= 2**21
        if position % 512 == 0:
            big.heard()
    assert SLOW in big.errors().values()
    assert small.errors() == {}
    assert bench.core.registry.table.get(2) is not None


def test_requests_that_fill_a_clients_queue_end_alone() -> None:
    bench, worker, client = serving(1, 2, 3, clients__send_queue_bytes=2**18)
    client.reconnect(window_frames=4)
    client.heard()
    worker.publish([RowShape(key, 0) for key in (1, 2, 3)])
    position = 1
    while bench.core.clients.evicted == 0:
        for key in (2, 3):
            worker.publish([RowShape(key, position, 8, top_k=20)])
        worker.publish([RowShape(1, 1 + position // 8)])
        position += 8
    assert bench.core.clients.sessions[5].send_queue.bytes <= 2**17
    worker.publish([RowShape(1, 1 + position // 8, 1, FINISHED)])
    rows, errors = list[int](), dict[int, int]()
    while len(bench.core.clients.sessions[5].send_queue):
        heard = client.heard()
        client.ack()
        errors |= {each.frame.error.request_id: each.frame.error.code for each in heard if each.body == "error"}
        rows += [
            row.position for each in heard for batch in each.batches for row in batch.rows() if row.request_id == 1
        ]
    assert rows == list(range(2 + position // 8))
    assert errors
    assert set(errors.values()) == {SLOW}
    assert 1 not in errors


def test_long_searches_are_made_once_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A next life's resumes, one by one, look through the queue of the life before at most once in each tick."""
    bench, worker, client = serving(*range(1, 9))
    for position in range(100):
        worker.publish(row_shapes(range(1, 9), position=position))
    bench.outcomes[client.peer] = Outcome.GONE
    again = bench.client(6)
    searches = []
    found = send_queue.SendQueue.frames_of

    def _counted(box: send_queue.SendQueue, keys: client_frames.RequestIds) -> list[client_frames.Frame]:
        if keys.size and box is bench.core.clients.sessions[5].send_queue:
            searches.append(keys.size)
        return found(box, keys)

    monkeypatch.setattr(send_queue.SendQueue, "frames_of", _counted)
    for key in range(1, 9):
        resume(again, key, 0)
    assert searches == [1]
    bench.advance(0.1)
    assert searches == [1, 7]
    taken: dict[int, int] = {}
    while more := places(again):
        for key, position, tokens in more:
            assert position == taken.get(key, 0)
            taken[key] = position + tokens
        again.ack()
    assert taken == dict.fromkeys(range(1, 9), 100)


@pytest.mark.parametrize("begin", [BenchClient.ask, lambda client, generate: resume(client, generate.request_id, 0)])
def test_requests_of_one_client_are_bounded(begin: Callable[[BenchClient, Generate], None]) -> None:
    bench, _, client = serving(processor__requests_per_peer=2)
    for key in (1, 2, 3):
        begin(client, generate_of(key))
    (error,) = [heard.frame.error for heard in client.heard() if heard.body == "error"]
    assert (error.request_id, error.code) == (3, OVERLOADED)
    assert error.message == "open requests of one client: at most 2"
    assert len(bench.core.registry.table) == 2
    other = bench.client(6, name="other")
    begin(other, generate_of(5))
    assert other.errors() == {}


def test_resume_decodes_the_frames_that_have_its_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, worker, client = serving(1, 2)
    for position in range(50):
        worker.publish(row_shapes([2], position=position))
    worker.publish(row_shapes([1]))
    bench.outcomes[client.peer] = Outcome.GONE
    again = bench.client(6)
    decoded = []

    def counted(data: bytes, limits: Limits) -> LogprobBatch:
        decoded.append(len(data))
        return decode(data, limits)

    monkeypatch.setattr(client_frames, "decode", counted)
    resume(again, 1, 0)
    assert places(again) == [(1, 0, 1)]
    assert len(decoded) == 1


def test_rows_that_were_not_asked_for_are_charged_to_their_worker() -> None:
    bench, worker, client = serving(processor__max_requests=4, processor__requests_per_peer=3)
    liar = bench.worker("liar")
    liar.publish(row_shapes(range(100, 110)))
    table = bench.core.registry.table
    assert len(table) == 3
    liar.heard()
    for key in range(1, 4):
        client.ask(generate_of(key))
    assert client.errors() == {}
    assert sorted(request.id for request in table.open_requests())[:3] == [1, 2, 3]
    assert worker.known is not None


def test_requests_of_one_key_are_charged_together_and_released_apart() -> None:
    table = RequestTable(8, 8, per_peer=3)
    first, second = (Source(stream, f"{stream}/7", is_resumed=True, key="gpu") for stream in (1, 2))
    for request_id, source in ((1, first), (2, second), (3, second)):
        table.open_unclaimed(request_id, 5, source, Deadline(9.0), UNCLAIMED)
    assert table.limit_for(second.payer) == "open requests of one key: at most 3"
    assert table.room_for(("worker", 3)) == 3
    oldest = table.oldest_unclaimed()
    assert oldest is not None
    assert oldest.id == 1


def test_workers_with_one_key_wait_for_room_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench({"processor.requests_per_peer": 4, "processor.credit_items": 4})
    identity = Identity("gpu", frozenset(Role))
    monkeypatch.setattr(bench.core.workers.listener, "identity", lambda _: identity)
    workers = [bench.worker(name, first_sequence=2, next_sequence=2) for name in ("a", "b")]
    for place, worker in enumerate(workers):
        for position in (5, 6):
            worker.publish(row_shapes(range(1 + 4 * place, 5 + 4 * place), position=position))
    table = bench.core.registry.table
    assert sorted(request.id for request in table.open_requests()) == [1, 2, 3, 4]
    assert [granted(worker) > worker.sequence + 2 for worker in workers] == [True, False]
    clients = [bench.client(5 + place, name=f"client-{place}") for place in range(2)]
    for place, client in enumerate(clients):
        for key in range(1 + 4 * place, 5 + 4 * place):
            resume(client, key, 5)
        bench.pass_time(0.1, *workers)
        assert sorted(places(client)) == sorted(
            (key, 5 + i, 1) for key in range(1 + 4 * place, 5 + 4 * place) for i in (0, 1)
        )
    for worker in workers:
        assert "abort" not in worker.heard_bodies()
        assert granted(worker) > worker.sequence + 2


def test_invented_requests_are_dropped_a_few_at_a_time() -> None:
    bench, _, client = serving(1, processor__unclaimed_timeout_ms=1000)
    liar = bench.worker("liar")
    for _ in range(2):
        liar.publish(row_shapes(range(1000 + 200 * liar.sequence, 1200 + 200 * liar.sequence)))
    client.ask(generate_of(2, deadline_ms=1000))
    table, left = bench.core.registry.table, []
    for seconds in (1.0, 0.0):
        bench.advance(seconds)
        left.append(sum(not request.is_claimed for request in table.open_requests()))
        assert table.get(2) is None
    assert left == [144, 0]


def test_hello_opens_no_requests() -> None:
    bench = Bench()
    worker = bench.worker(request_ids=list(range(1, 1001)))
    assert len(bench.core.registry.table) == 0
    assert worker.heard_bodies().count("abort") == 0
    client = bench.client()
    resume(client, 7, 0)
    worker.publish(row_shapes([7]))
    assert places(client) == [(7, 0, 1)]
    assert len(bench.core.registry.table) == 1


def test_rows_that_wait_for_vanished_clients_make_no_other_wait() -> None:
    bench = Bench({"processor.pending_items": 64, "processor.credit_items": 64})
    worker, victim = bench.worker(request_ids=list(range(10, 40)), next_sequence=1), bench.client(6)
    bench.pass_time(2.0, worker, victim)
    victim.ask(generate_of(2))
    for position in range(200):
        if position < 30:
            worker.publish([RowShape(10 + position)])
        assert granted(worker) > worker.sequence, "the worker waits"
        worker.publish(row_shapes([2], position=position))
        assert places(victim) == [(2, position, 1)]
        victim.ack()
    assert {request.id for request in bench.core.registry.table.open_requests()} == {2}


def test_own_standstill_gives_up_nothing_that_waits_for_clients() -> None:
    bench = Bench({"processor.pending_items": 64, "processor.credit_items": 64})
    worker = bench.worker(request_ids=[1], next_sequence=1)
    bench.pass_time(2.0, worker)
    for position in range(40):
        worker.publish(row_shapes([1], position=position))
    bench.clock.advance(60.0)
    bench.core.extend_deadlines(60.0, bench.clock.now())
    bench.core.worker_connections.tick(bench.clock.now())
    client = bench.client()
    resume(client, 1, 0)
    assert len(places(client)) == 40


def test_handshakes_are_bounded() -> None:
    """A client that says hello again and again has its frames sent again a few times, then once an interval.

    It is not refused: what it says while the processor stands still is read at once.
    """
    bench, worker, client = serving(1)
    worker.publish(row_shapes([1]))
    client.heard()
    for _ in range(50):
        client.say_hello()
    again = [heard.body for heard in client.heard()]
    assert again.count("outputs") == again.count("welcome") <= 10
    assert "refusal" not in again
    bench.advance(1.0)
    client.say_hello()
    assert "welcome" in [heard.body for heard in client.heard()]


def test_tick_that_fails_for_one_goes_on_for_the_rest() -> None:
    bench = Bench()
    bench.worker("a")
    bench.worker("b")
    bench.client(5)
    bench.client(6)
    bench.core.workers.by_id["a"].stream.missing = None  # type: ignore[method-assign, assignment]
    bench.core.clients.sessions[5].send_queue = None  # type: ignore[assignment]
    bench.clock.advance(1.0)
    for worker in bench.core.workers.by_id.values():
        worker.last_heard = bench.clock.now()
    bench.core.tick(bench.clock.now())
    assert {name: worker.peer for name, worker in bench.core.workers.by_id.items()} == {"a": None, "b": b"b/7"}
    assert bench.core.clients.sessions[5].peer is None
    assert bench.core.clients.sessions[6].peer is not None


@pytest.mark.long
def test_client_whose_news_is_too_much_is_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench({"clients.send_queue_bytes": 2**21})
    attacker = bench.client()
    drops = []
    drop = send_queue.SendQueue.drop_outputs

    def _counted(box: send_queue.SendQueue) -> list[client_frames.Frame]:
        drops.append(len(box))
        return drop(box)

    monkeypatch.setattr(send_queue.SendQueue, "drop_outputs", _counted)
    key = 0
    while bench.core.clients.sessions:
        key += 1
        resume(attacker, key, 0)
    assert len(drops) == 1
    assert bench.core.clients._budget.bytes == 0
    assert len(bench.core.registry.table) == 0
