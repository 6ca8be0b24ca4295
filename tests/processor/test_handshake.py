"""WorkerConnections: which worker may publish, and in which connection."""

from typing import Any

import pytest

from tests.in_process.bench import Bench, BenchWorker
from tests.in_process.builders import generate_of, hello_of
from tests.processor.serving import serving
from tokenbus.bus import Identity, Outcome, Role
from tokenbus.testing import RowShape, row_shapes
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated import stream_pb2 as pb
from tokenbus_contracts.generated.request_pb2 import ErrorCode

LIMITS = pb.RefusalReason.REFUSAL_REASON_LIMITS
PROTOCOL = pb.RefusalReason.REFUSAL_REASON_PROTOCOL
HELLO_FIRST = pb.RefusalReason.REFUSAL_REASON_HELLO_FIRST
TAKEN = pb.RefusalReason.REFUSAL_REASON_WORKER_ID_TAKEN
STOPPED = pb.GoodbyeReason.GOODBYE_REASON_STOPPED
OUTDATED = pb.RefusalReason.REFUSAL_REASON_EPOCH_OUTDATED


def test_hello_is_answered_with_where_to_go_on_and_credit() -> None:
    """The welcome says which processor answers, where to go on, the credit, and how often peers are heard (case 19)."""
    bench = Bench({"processor.credit_items": 8, "bus.heartbeat_timeout_ms": 1500})
    worker = bench.worker(first_sequence=4, next_sequence=9)
    welcome = worker.heard()[0].welcome
    assert (welcome.processor_id, welcome.resume_from) == ("bench", 4)
    assert (welcome.credit.through_sequence, welcome.credit.bytes) == (11, bench.settings.processor.credit_bytes)
    assert (welcome.heartbeat_interval_ms, welcome.heartbeat_timeout_ms) == (500, 1500)


def test_nothing_is_taken_before_the_hello() -> None:
    """An item of an unknown peer is dropped, and the peer is asked for a hello, once an interval (case 19)."""
    bench = Bench()
    worker = BenchWorker(bench, "worker-0", 7)
    for _ in range(3):
        worker.publish(row_shapes([1]))
    assert worker.refusals() == [HELLO_FIRST]
    bench.clock.advance(0.99)
    worker.beat()
    assert worker.refusals() == []
    bench.clock.advance(0.01)
    worker.beat()
    assert worker.refusals() == [HELLO_FIRST]
    assert len(bench.core.registry.table) == 0


def test_hello_of_a_connection_that_has_gone_is_dropped() -> None:
    """It proves no key any more, and is no worker that was refused; said again, it is taken."""
    bench = Bench()
    worker = BenchWorker(bench, "worker-0", 7)
    bench.peers.gone.add(worker.peer)
    bench.peers.identities[worker.peer] = Identity("", frozenset())
    worker.say_hello()
    assert not bench.sent[worker.peer]
    assert not bench.core.worker_connections.refused
    bench.peers.gone.clear()
    worker.say_hello()
    assert worker.refusals() == [pb.RefusalReason.REFUSAL_REASON_NOT_AUTHORIZED]


def test_reconnected_worker_goes_on_where_it_was() -> None:
    """A worker that reconnects is sent the next expected sequence (case 17)."""
    bench = Bench()
    worker = bench.worker()
    worker.publish(row_shapes([1]))
    worker.publish(row_shapes([1], position=1))
    old, worker.peer = worker.peer, b"another"
    worker.say_hello(next_sequence=3)
    assert worker.heard()[0].welcome.resume_from == 3
    heartbeat = write_frame(pb.WorkerFrame(epoch=7, heartbeat=pb.Heartbeat(sent_at_ns=1)))
    bench.core.worker_connections.receive(old, [heartbeat], 0.0)
    assert [read_frame(pb.ProcessorFrame, parts[0]).refusal.reason for parts in bench.sent[old]][-1] == HELLO_FIRST


def test_what_left_the_retention_while_it_was_away_is_lost() -> None:
    """A worker that has less than is expected ends the requests whose rows may be gone, and the stream goes on."""
    _, worker, client = serving(1)
    worker.admit(1)
    worker.say_hello(first_sequence=4, next_sequence=4, request_ids=[1])
    assert client.errors() == {1: ErrorCode.ERROR_CODE_GAP}
    assert worker.known.stream.expected == 4


@pytest.mark.parametrize(
    "name", ["max_message_bytes", "max_rows", "max_tokens_per_row", "max_draft_tokens_per_row", "max_top_k"]
)
def test_wider_limits_are_refused(name: str) -> None:
    """A worker whose batches may be exactly as wide as is taken is welcome, and one a bit wider is not (case 26)."""
    bench = Bench()
    most = getattr(bench.settings.limits, name)
    exact: dict[str, Any] = {
        "max_message_bytes": 1, "max_rows": 1, "max_tokens_per_row": 1, "max_draft_tokens_per_row": 0, "max_top_k": 0,
    }  # fmt: skip
    assert bench.worker("a", limits=pb.StreamLimits(**exact | {name: most})).refusals() == []
    worker = bench.worker("b", limits=pb.StreamLimits(**exact | {name: most + 1}))
    (frame,) = worker.heard()
    assert frame.refusal.reason == LIMITS
    assert frame.refusal.message == f"hello.limits.{name}: at most {most}, got {most + 1}"
    assert "b" not in bench.core.workers.by_id


@pytest.mark.parametrize(
    ("roles", "names", "is_taken"),
    [
        ({Role.WORKER}, ("worker-*",), True),
        ({Role.WORKER, Role.CLIENT}, ("a", "worker-0"), True),
        ({Role.WORKER}, ("worker-1", "w"), False),
        ({Role.CLIENT, Role.OBSERVER}, ("*",), False),
    ],
)
def test_key_must_be_allowed_to_be_that_worker(roles: set[Role], names: tuple[str, ...], *, is_taken: bool) -> None:
    bench = Bench()
    bench.peers.identities[b"worker-0/7"] = Identity("gpu-node", frozenset(roles), names)
    worker = bench.worker()
    assert ("worker-0" in bench.core.workers.by_id) is is_taken
    assert (worker.peer in bench.peers.admitted) is is_taken
    if not is_taken:
        (frame,) = worker.heard()
        assert frame.refusal.reason == pb.RefusalReason.REFUSAL_REASON_NOT_AUTHORIZED
        assert frame.refusal.message == "key gpu-node may not be worker worker-0"


def test_live_workers_id_cannot_be_taken() -> None:
    """Another life of a worker that is alive is refused; once that is silent for too long, it makes way (case 8)."""
    bench = Bench({"bus.heartbeat_timeout_ms": 3000})
    first = bench.worker(epoch=7)
    second = bench.worker(epoch=8)
    assert second.refusals() == [TAKEN]
    bench.clock.advance(3.0)
    second.say_hello()
    assert second.refusals() == [TAKEN]
    bench.clock.advance(0.01)
    second.say_hello()
    assert second.heard()[0].HasField("welcome")
    assert bench.core.workers.by_id["worker-0"].stream.epoch == 8
    first.beat()
    assert first.refusals() == [HELLO_FIRST]


def test_new_life_takes_over_at_once_where_the_old_one_is_gone() -> None:
    bench = Bench()
    worker, client = bench.worker(epoch=7), bench.client()
    client.ask(generate_of(1))
    bench.outcomes[worker.peer] = Outcome.GONE
    again = bench.worker(epoch=8)
    assert again.heard()[0].HasField("welcome")
    assert client.errors() == {1: ErrorCode.ERROR_CODE_WORKER_LOST}


@pytest.mark.parametrize("proof", [b"", b"guessed"])
def test_live_workers_stream_cannot_be_fed_by_another_connection(proof: bytes) -> None:
    """A hello with a live worker's name and epoch is refused unless it proves to be the same life; nothing changes."""
    bench = Bench()
    worker = bench.worker(proof=b"drawn at random")
    forger = BenchWorker(bench, "worker-0", 7)
    forger.peer = b"forger"
    forger.say_hello(proof=proof)
    assert forger.refusals() == [TAKEN]
    forger.publish([RowShape(1)])
    assert forger.refusals() == [HELLO_FIRST]
    gap = pb.Gap(first_sequence=1, last_sequence=9, reason=pb.GapReason.GAP_REASON_RETENTION)
    for frame in (pb.WorkerFrame(gap=gap), pb.WorkerFrame(goodbye=pb.Goodbye(reason=STOPPED))):
        forger.say(frame)
    assert worker.known.stream.expected == 1
    assert bench.core.workers.by_id == {"worker-0": worker.known}
    worker.peer = b"another connection"
    worker.say_hello(proof=b"drawn at random")
    assert worker.heard()[0].HasField("welcome")


def test_no_epoch_locks_a_name_out_for_good() -> None:
    bench = Bench()
    for leaves in (True, False):
        forged = bench.worker(epoch=2**64 - 1)
        assert "welcome" in forged.heard_bodies()
        if leaves:
            forged.say(pb.WorkerFrame(goodbye=pb.Goodbye(reason=STOPPED)))
        else:
            bench.advance(3.1)
        assert bench.worker(epoch=7).refusals() == [OUTDATED]
        bench.advance(3.1)
        worker = bench.worker(epoch=7)
        assert worker.heard()[0].HasField("welcome")
        worker.say(pb.WorkerFrame(goodbye=pb.Goodbye(reason=STOPPED)))
        bench.advance(3.1)


@pytest.mark.parametrize("first", [2**61 + 1, 2**62])
def test_sequence_that_leaves_no_room_is_refused(first: int) -> None:
    bench = Bench()
    far = bench.worker("far", first_sequence=first, next_sequence=first)
    assert far.refusals() == [PROTOCOL]
    liar, silent = bench.worker("liar"), bench.worker("silent")
    gap = pb.Gap(first_sequence=1, last_sequence=first, reason=pb.GapReason.GAP_REASON_RETENTION)
    liar.say(pb.WorkerFrame(gap=gap))
    assert liar.known.stream.expected == 1
    gap.last_sequence = 2**61
    liar.say(pb.WorkerFrame(gap=gap))
    assert liar.known.stream.expected == 2**61 + 1
    silent.heard()
    bench.pass_time(3.5, liar)
    assert set(bench.core.workers.by_id) == {"liar"}
    assert "heartbeat" in liar.heard_bodies()


def test_connection_is_one_worker() -> None:
    bench = Bench()
    worker = bench.worker("a")
    worker.worker_id = "b"
    worker.say_hello()
    assert worker.refusals() == [PROTOCOL]
    assert set(bench.core.workers.by_id) == {"a"}


def test_older_life_is_refused() -> None:
    bench = Bench()
    worker = bench.worker(epoch=8)
    assert bench.worker(epoch=7).refusals() == [OUTDATED]
    worker.say(pb.WorkerFrame(goodbye=pb.Goodbye(reason=STOPPED)))
    assert bench.worker(epoch=7).refusals() == [OUTDATED]
    worker.heard()
    worker.say_hello()
    assert worker.refusals() == [OUTDATED]
    assert bench.worker(epoch=9).heard()[0].HasField("welcome")


def test_workers_are_bounded() -> None:
    bench = Bench({"processor.max_workers": 2})
    refused = pb.RefusalReason.REFUSAL_REASON_TOO_MANY_WORKERS
    assert [bench.worker(name).refusals() for name in "abc"] == [[], [], [refused]]


def test_hello_that_contradicts_itself_or_the_stream_is_refused() -> None:
    bench = Bench()
    assert bench.worker(first_sequence=3, next_sequence=2).refusals() == [PROTOCOL]
    assert bench.worker("b", first_sequence=3, next_sequence=3).refusals() == []
    worker = bench.worker("c")
    worker.publish(row_shapes([1]))
    worker.heard()
    worker.say_hello(next_sequence=1)
    assert worker.refusals() == [PROTOCOL]


def test_other_major_version_is_refused_by_name() -> None:
    bench = Bench()
    frame = pb.WorkerFrame(epoch=1, hello=hello_of(schema_major=2))
    for data in (frame.SerializeToString(), b"\xff\xff"):
        bench.core.worker_connections.receive(b"x", [data], 0.0)
    found = [read_frame(pb.ProcessorFrame, parts[0]).refusal.reason for parts in bench.sent[b"x"]]
    assert found[1] == PROTOCOL
    assert found[0] in {pb.RefusalReason.REFUSAL_REASON_SCHEMA_VERSION, PROTOCOL}
    assert bench.core.worker_connections.refused == 2
