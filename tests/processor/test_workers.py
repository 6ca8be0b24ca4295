"""WorkerConnections: what comes from workers, what goes to them, and when they are lost."""

import pytest

from tests.in_process.bench import Bench, BenchWorker
from tests.in_process.builders import encoded, generate_of, item_of
from tests.processor.serving import serving
from tokenbus.bus import Outcome
from tokenbus.testing import RowShape, row_shapes
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated import stream_pb2 as pb
from tokenbus_contracts.generated.request_pb2 import ErrorCode

PROTOCOL = pb.RefusalReason.REFUSAL_REASON_PROTOCOL
HELLO_FIRST = pb.RefusalReason.REFUSAL_REASON_HELLO_FIRST
STOPPED, RESTARTING = pb.GoodbyeReason.GOODBYE_REASON_STOPPED, pb.GoodbyeReason.GOODBYE_REASON_RESTARTING


def test_item_beyond_the_credit_ends_the_connection() -> None:
    """A worker that sends more than its credit is refused, and must say hello again (case 20)."""
    bench = Bench({"processor.credit_items": 2})
    worker = bench.worker()
    worker.heard()
    data = encoded(row_shapes([1]), 3)
    worker.item(data, 3)
    assert worker.refusals() == [PROTOCOL]
    worker.beat()
    assert worker.refusals() == [HELLO_FIRST]


@pytest.mark.parametrize(
    "message", ["no parts", "no payload", "two payloads", "epoch", "length", "gap backwards", "vast gap"]
)
def test_frame_that_breaks_the_rules_ends_nothing_but_itself(message: str) -> None:
    bench = Bench()
    worker = bench.worker()
    data = encoded(row_shapes([1]), 1)
    frame = pb.WorkerFrame(epoch=7, item=item_of(data, 1))
    backwards = pb.Gap(first_sequence=5, last_sequence=4, reason=pb.GapReason.GAP_REASON_RETENTION)
    vast = pb.Gap(first_sequence=1, last_sequence=2**61 + 1, reason=pb.GapReason.GAP_REASON_RETENTION)
    messages = {
        "no parts": [],
        "no payload": [write_frame(frame)],
        "two payloads": [write_frame(frame), data, data],
        "epoch": [write_frame(pb.WorkerFrame(epoch=8, item=item_of(data, 1))), data],
        "length": [write_frame(frame), data + b"x"],
        "gap backwards": [write_frame(pb.WorkerFrame(epoch=7, gap=backwards))],
        "vast gap": [write_frame(pb.WorkerFrame(epoch=7, gap=vast))],
    }
    worker.heard()
    bench.core.worker_connections.receive(worker.peer, messages[message], bench.clock.now())
    assert bench.core.worker_connections.refused == 1
    assert worker.heard() == []
    worker.item(data, 1)
    assert worker.known.stream.expected == 2


@pytest.mark.parametrize("claimed", [2, 101, 2**62])
def test_lost_last_item_is_found_by_the_heartbeat(claimed: int) -> None:
    bench = Bench({"processor.credit_items": 100})
    worker = bench.worker()
    worker.heard()
    worker.beat(last_sequence=claimed)
    (frame,) = worker.heard()
    assert (frame.replay.first_sequence, frame.replay.last_sequence) == (1, min(claimed, 100))
    assert worker.known.stream.lag == min(claimed, 100)


def test_recovery_ends() -> None:
    """What is not sent again after some attempts is declared lost, and the handshake begins anew (case 18)."""
    bench = Bench({"processor.replay_attempts": 2, "processor.replay_timeout_ms": 500})
    worker, client = bench.worker(), bench.client()
    client.ask(generate_of(1))
    worker.heard()
    worker.item(encoded(row_shapes([1], position=1), 2), 2)
    bench.pass_time(2.0, worker, client, most=0.1)
    bodies = worker.heard_bodies()
    assert bodies.count("replay") == 2
    assert bodies.count("refusal") == 1
    assert client.errors() == {1: ErrorCode.ERROR_CODE_GAP}
    worker.say_hello(first_sequence=3, next_sequence=3)
    assert worker.heard()[0].welcome.resume_from == 3


def test_acknowledgements_are_few_and_complete() -> None:
    bench = Bench({"processor.credit_items": 16})
    worker = bench.worker()
    worker.heard()
    acks = []
    for sequence in range(1, 4):
        worker.admit(sequence)
        acks.append([frame.ack.through_sequence for frame in worker.heard() if frame.HasField("ack")])
    assert acks == [[], [2], []]
    bench.advance(0.0)
    assert [frame.ack.through_sequence for frame in worker.heard() if frame.HasField("ack")] == [3]
    bench.advance(0.0)
    assert "ack" not in worker.heard_bodies()


def test_heartbeats_go_out_once_an_interval() -> None:
    bench = Bench()
    worker = bench.worker()
    worker.admit(1)
    worker.say(pb.WorkerFrame(heartbeat=pb.Heartbeat(sent_at_ns=55, last_sequence=1)))
    worker.heard()
    bench.advance(0.99)
    assert "heartbeat" not in worker.heard_bodies()
    bench.advance(0.01)
    (beat,) = [frame.heartbeat for frame in worker.heard() if frame.HasField("heartbeat")]
    assert (beat.echo_ns, beat.last_sequence) == (55, 1)


def test_silent_worker_is_lost_after_the_timeout() -> None:
    bench = Bench({"bus.heartbeat_timeout_ms": 3000})
    worker, client = bench.worker(), bench.client()
    client.ask(generate_of(1))
    bench.pass_time(3.0, client)
    assert client.errors() == {}
    bench.pass_time(0.01, client)
    assert client.errors() == {1: ErrorCode.ERROR_CODE_WORKER_LOST}
    assert bench.core.workers.lost == 1
    worker.heard()
    assert bench.core.workers.by_stream == {}


@pytest.mark.parametrize("beats", [False, True])
def test_worker_without_progress_gets_no_new_requests_and_is_lost_after_its_longest_step(*, beats: bool) -> None:
    """It may be silent, as on a busy machine, or say that its engine makes no progress; its requests wait for it."""
    bench = Bench({"bus.heartbeat_timeout_ms": 3000})
    worker, client = bench.worker(longest_step_ms=30_000), bench.client()

    def nothing_until(seconds: int) -> None:
        while (passed := round(bench.clock.now() - began)) < seconds:
            bench.pass_time(1, client)
            if beats:
                worker.beat(stalled_ms=1000 * (passed + 1))

    client.ask(generate_of(1))
    began = bench.clock.now()
    nothing_until(4)
    client.ask(generate_of(2))
    nothing_until(5)
    assert worker.known.is_stalled
    assert [frame.generate.request_id for frame in worker.heard() if frame.HasField("generate")] == [1]
    assert bench.core.dispatch.room().models[0].workers == 0
    worker.beat()
    bench.advance(0)
    assert [frame.generate.request_id for frame in worker.heard() if frame.HasField("generate")] == [2]
    began = bench.clock.now()
    nothing_until(33)
    assert client.errors() == {}
    bench.pass_time(0.1, client)
    errors = [heard.frame.error for heard in client.heard() if heard.body == "error"]
    assert {error.request_id for error in errors} == {1, 2}
    expected = "its engine made no progress for 33000 ms" if beats else "silent for 33000 ms"
    assert all(expected in error.message for error in errors), errors


def test_silent_worker_is_lost_after_the_timeout_if_it_is_idle() -> None:
    bench = Bench({"bus.heartbeat_timeout_ms": 3000})
    bench.worker(longest_step_ms=30_000)
    bench.pass_time(3.0)
    assert bench.core.workers.lost == 0
    bench.pass_time(0.01)
    assert bench.core.workers.lost == 1


def test_worker_whose_connection_closed_has_half_a_second_to_come_back() -> None:
    """It gets no new requests meanwhile, what it had sent before still counts, and our own stall is not its absence."""
    bench, worker, client = serving(1)
    bench.peers.gone.add(worker.peer)
    bench.advance(0.1)
    client.ask(generate_of(2))
    worker.publish([RowShape(1, 0, tokens=1)])
    bench.clock.advance(9)
    bench.core.extend_deadlines(9, bench.clock.now())
    bench.advance(0.4)
    assert worker.known.is_stalled
    assert client.errors() == {}
    worker.peer += b"/2"
    worker.say_hello(next_sequence=2, request_ids=[1])
    bench.advance(0.6)
    assert [frame.generate.request_id for frame in worker.heard() if frame.HasField("generate")] == [2]
    bench.peers.gone.add(worker.peer)
    bench.advance(0.1)
    bench.advance(0.49)
    assert client.errors() == {}
    bench.advance(0.01)
    errors = [heard.frame.error for heard in client.heard() if heard.body == "error"]
    assert {error.request_id: error.code for error in errors} == dict.fromkeys((1, 2), ErrorCode.ERROR_CODE_WORKER_LOST)
    assert "its connection closed, and it did not come back within 500 ms" in errors[0].message


def test_step_that_is_longer_than_the_processor_allows_is_refused() -> None:
    bench = Bench({"processor.longest_step_ms": 30_000})
    assert bench.worker(longest_step_ms=30_001).refusals() == [pb.RefusalReason.REFUSAL_REASON_LIMITS]
    assert bench.worker(longest_step_ms=30_000).refusals() == []


@pytest.mark.parametrize("reason", [STOPPED, pb.GoodbyeReason.GOODBYE_REASON_FAILED, RESTARTING])
def test_goodbye(reason: pb.GoodbyeReason) -> None:
    """A worker that stops takes its requests with it; one that says it restarts has time to come back."""
    bench, worker, client = serving(1)
    worker.admit(1)
    client.heard()
    worker.say(pb.WorkerFrame(goodbye=pb.Goodbye(reason=reason, last_sequence=1, message="\u6f22" * 341)))
    if reason == RESTARTING:
        assert client.errors() == {}
        assert worker.known.peer is None
        bench.pass_time(4.0, client)
    assert client.errors() == {1: ErrorCode.ERROR_CODE_WORKER_LOST}


def test_worker_that_reads_nothing_is_disconnected() -> None:
    bench, worker, client = serving()
    bench.outcomes[worker.peer] = Outcome.FULL
    client.ask(generate_of(1))
    assert worker.known.peer is None
    bench.outcomes.clear()
    worker.heard()
    worker.beat()
    assert worker.refusals() == [HELLO_FIRST]


def test_counts_outlive_a_worker() -> None:
    bench = Bench({"processor.max_workers": 1})
    worker = bench.worker("a", epoch=1)
    worker.publish([RowShape(1)])
    worker.say(pb.WorkerFrame(goodbye=pb.Goodbye(reason=STOPPED)))
    assert bench.worker("a", epoch=2).known.stream.counts.taken == 1


def test_refusal_fits_its_frame() -> None:
    bench = Bench()
    worker = BenchWorker(bench, "\u6f22" * 21, 7)
    worker.say_hello(first_sequence=3, next_sequence=2)
    assert worker.refusals() == [PROTOCOL]
