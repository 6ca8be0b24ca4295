"""Intake: a worker's items become settled steps, and what is lost or refused ends those it touched."""

import asyncio
import inspect
import re

import pytest

from tests.in_process.bench import Bench, BenchClient, BenchWorker
from tests.in_process.builders import encoded, generate_of
from tests.pages import ROOT
from tests.processor.serving import serving
from tokenbus.delivery import Step
from tokenbus.processor.intake import Intake
from tokenbus.testing import RowShape, batch, row_shapes
from tokenbus_contracts import BatchKind, RowStatus, encode
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestError
from tokenbus_contracts.generated.stream_pb2 import Gap, GapReason, WorkerFrame

FINISHED = RowStatus.FINISHED_LENGTH
GAP = ErrorCode.ERROR_CODE_GAP


def asked(*keys: int, **processor: object) -> tuple[Bench, BenchWorker, BenchClient]:
    bench, worker, client = serving(*keys, **{f"processor__{name}": value for name, value in processor.items()})
    client.heard()
    worker.heard()
    return bench, worker, client


def tokens(client: BenchClient) -> dict[int, int]:
    found: dict[int, int] = {}
    for heard in client.outputs():
        for row in heard.batches[0].rows():
            found[row.request_id] = found.get(row.request_id, 0) + row.token_ids.size
    return found


def release_all(steps: "asyncio.Queue[Step | None]") -> None:
    while not steps.empty():
        step = steps.get_nowait()
        assert step is not None
        step.pending_ack.release()


def gap(worker: BenchWorker, first: int, last: int, *keys: int) -> None:
    lost = Gap(first_sequence=first, last_sequence=last, reason=GapReason.GAP_REASON_RETENTION, request_ids=keys)
    worker.say(WorkerFrame(gap=lost))


def test_gap_ends_those_it_names_and_no_others() -> None:
    """Items that are lost end the requests that had rows in them, saying which items and why (case 18, 21)."""
    _, worker, client = asked(1, 2)
    gap(worker, 1, 2, 1, 99)
    (heard,) = client.heard()
    assert (heard.frame.error.request_id, heard.frame.error.code) == (1, GAP)
    assert heard.frame.error.message == "items 1 to 2 of worker-0/7 are lost: the worker does not retain them"
    worker.sequence = 2
    worker.publish(row_shapes([2]))
    assert tokens(client) == {2: 1}


def test_gap_that_names_nobody_ends_every_request_of_its_stream() -> None:
    bench, worker, client = asked(1, 2)
    other = bench.worker("other")
    client.ask(generate_of(3))
    gap(worker, 1, 1)
    assert client.errors() == {1: GAP, 2: GAP}
    other.publish(row_shapes([3]))
    assert tokens(client) == {3: 1}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_part_that_is_known_to_be_lost_ends_its_own_requests_alone(lost: int) -> None:
    bench, worker, client = asked(1, 2, 3, 4, step_timeout_ms=1000)
    for part in range(3):
        if part == lost:
            worker.sequence += 1
            gap(worker, worker.sequence, worker.sequence, part + 1)
        else:
            worker.publish(row_shapes([part + 1]), part=(part, 3), step_rows=3, indices=[part], step=1)
    worker.publish(row_shapes([4]), step=2)
    bench.pass_time(1.0, worker, client)
    heard = client.heard()
    outputs = [each.batches[0].request_ids.tolist() for each in heard if each.body == "outputs"]
    assert sorted(key for keys in outputs for key in keys) == sorted({1, 2, 3, 4} - {lost + 1})
    assert [each.frame.error.request_id for each in heard if each.body == "error"] == [lost + 1]


@pytest.mark.parametrize("whole", [1, 3])
def test_gap_of_earlier_steps_explains_no_later_one(whole: int) -> None:
    bench, worker, client = asked(1, 2, 3, step_timeout_ms=1000)
    worker.sequence = 1
    gap(worker, 1, 1, 3)
    for step in range(1, whole + 1):
        worker.publish(row_shapes([1], position=step - 1), step=step)
    worker.publish(row_shapes([1], position=whole), part=(0, 2), step_rows=2, step=whole + 1)
    bench.pass_time(1.0, worker, client)
    assert client.errors() == {2: GAP, 3: GAP}


def test_own_standstill_does_not_count_against_a_step() -> None:
    bench, worker, client = asked(1, 2, step_timeout_ms=2000)
    worker.publish(row_shapes([1]), step=1, part=(0, 2), step_rows=2)
    bench.clock.advance(60.0)
    bench.core.extend_deadlines(60.0, bench.clock.now())
    bench.core.tick(bench.clock.now())
    worker.publish(row_shapes([2]), step=1, part=(1, 2), step_rows=2, indices=[1])
    assert [heard.batches[0].request_ids.tolist() for heard in client.outputs()] == [[1, 2]]


def test_time_without_credit_does_not_count_against_a_step() -> None:
    bench, worker, client = asked(1, 2, step_timeout_ms=2000, step_queue=1)
    steps = bench.core.intake.step_queue = asyncio.Queue()
    worker.publish(row_shapes([1, 2]), step=1)
    worker.publish(row_shapes([1], position=1), step=2, part=(0, 2), step_rows=2)
    client.heard()
    assert bench.core.intake.is_throttled(worker.known)
    bench.pass_time(5.0, worker, client)
    release_all(steps)
    worker.publish(row_shapes([2], position=1), step=2, part=(1, 2), step_rows=2, indices=[1])
    assert tokens(client) == {1: 1, 2: 1}
    assert client.errors() == {}


def test_part_that_contradicts_its_step_ends_its_own_requests() -> None:
    """A part that disagrees with the others is refused with its requests (case 28)."""
    bench, worker, client = asked(1, 2, 3)
    worker.publish(row_shapes([1]), step=1, part=(0, 2), step_rows=2)
    worker.publish(row_shapes([2]), step=1, part=(1, 3), step_rows=3, indices=[1])
    assert client.errors() == {2: GAP}
    assert bench.core.intake.refused_parts == 1


@pytest.mark.parametrize(("differs", "counted"), [(False, (1, 0)), (True, (0, 1))])
def test_other_ranks_batches_are_dropped(differs: bool, counted: tuple[int, int]) -> None:  # noqa: FBT001 - what differs
    """A step that comes a second time is dropped; one that differs from the first is counted (case 6)."""
    _, worker, client = asked(1)
    worker.publish([RowShape(1)], step=1)
    tokens(client)
    again = batch([RowShape(1)], step=1, sequence=2)
    if differs:
        again = type(again).of_views(again.header, again.columns | {"token_ids": again.token_ids ^ 1})
    worker.item(encode(again), 2)
    assert tokens(client) == {}
    counts = worker.known.stream.counts
    assert (counts.duplicates, counts.divergences) == counted


def test_worker_tells_of_its_requests() -> None:
    bench, worker, client = asked(1, 2)
    worker.admit(1, prompt_tokens=7)
    worker.fail(RequestError(request_id=2, code=ErrorCode.ERROR_CODE_ENGINE, message="broke"))
    first, second = client.heard()
    assert (first.frame.admitted.request_id, first.frame.admitted.prompt_tokens) == (1, 7)
    assert (second.frame.error.request_id, second.frame.error.message) == (2, "broke")
    request = bench.core.registry.table.get(1)
    assert request is not None
    assert request.generate is None
    assert worker.heard() == []


def test_reconciling_ends_what_the_worker_lost_and_asks_again_for_what_it_never_got() -> None:
    _, worker, client = asked(1, 2, 3)
    for key in (1, 3):
        worker.admit(key)
    client.heard()
    worker.heard()
    worker.say_hello(next_sequence=3, request_ids=[3])
    assert client.errors() == {1: ErrorCode.ERROR_CODE_WORKER_LOST}
    assert [frame.generate.request_id for frame in worker.heard() if frame.HasField("generate")] == [2]


def test_reconciling_asks_for_nothing_again_that_was_sent_after_the_hello() -> None:
    """A hello cannot name what its worker is sent later: sent once more, a request that is over by then runs twice."""
    bench = Bench()
    bench.core.begin(bench.clock.now())
    client = bench.client()
    client.ask(generate_of(1))
    worker = bench.worker(next_sequence=3)
    client.ask(generate_of(2))
    assert [frame.generate.request_id for frame in worker.heard() if frame.HasField("generate")] == [1, 2]
    worker.sequence = 0
    for _ in range(3):
        worker.publish(row_shapes([9]))
    assert worker.known.reconcile is None
    assert "generate" not in worker.heard_bodies()


def test_reconciling_spares_what_has_its_last_row_in_a_step_that_waits_for_its_draft() -> None:
    _, worker, client = asked(1, 2)
    for key in (1, 2):
        worker.admit(key)
    client.heard()
    worker.say_hello(next_sequence=4)
    worker.sequence = 2
    worker.publish([RowShape(1, 0, 2, FINISHED)], step=1, draft_follows=True)
    assert client.errors() == {}
    worker.publish([RowShape(1, 0, 2)], step=1, kind=BatchKind.DRAFT)
    lost, had = client.heard()
    assert (lost.frame.error.request_id, lost.frame.error.code) == (2, ErrorCode.ERROR_CODE_WORKER_LOST)
    assert [(row.request_id, row.token_ids.size) for row in had.batches[0].rows()] == [(1, 2)]


def test_reconciling_comes_after_the_steps_that_arrive_at_once_with_what_is_younger() -> None:
    _, worker, client = asked(1, 2)
    for key in (1, 2):
        worker.admit(key)
    client.heard()
    worker.say_hello(next_sequence=4, request_ids=[2])
    worker.item(encoded(row_shapes([2]), 4, step=2), 4)
    assert tokens(client) == {}
    worker.item(encoded([RowShape(1, 0, 2, FINISHED)], 3, step=1), 3)
    assert tokens(client) == {1: 2, 2: 1}


@pytest.mark.parametrize("bound", ["pending_items", "pending_bytes"])
def test_who_holds_too_much_gives_way(bound: str) -> None:
    """A client that keeps more of a stream waiting than may wait is ended as slow, and the stream goes on (case 20)."""
    size = len(encoded(row_shapes([1]), 1))
    most = {"pending_items": 2, "pending_bytes": 2 * size + 10}[bound]
    bench, worker, client = asked(1, **{bound: most})
    for position in range(2):
        worker.publish(row_shapes([1], position=position))
    assert tokens(client) == {1: 2}
    worker.publish(row_shapes([1], position=2))
    assert client.errors() == {1: ErrorCode.ERROR_CODE_SLOW_CLIENT}
    bench.advance(0.0)
    assert [frame.ack.through_sequence for frame in worker.heard() if frame.HasField("ack")] == [3]


def test_what_is_left_of_a_stream_is_handed_out_when_it_ends() -> None:
    bench, worker, client = asked(1, 2)
    worker.publish(row_shapes([1]), step=1, draft_follows=True)
    assert tokens(client) == {}
    bench.core.worker_connections._lose(worker.known, "test")
    heard = client.heard()
    assert [each.body for each in heard] == ["outputs", "error", "error"]
    assert write_frame(heard[1].frame)


def test_defect_in_handing_out_ends_the_requests_it_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, worker, client = asked(1, 2)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(bench.core.intake.router, "settle", broken)
        worker.publish(row_shapes([1]))
    (heard,) = client.heard()
    assert (heard.frame.error.request_id, heard.frame.error.code) == (1, ErrorCode.ERROR_CODE_INTERNAL)
    worker.publish(row_shapes([2], tokens=3))
    assert tokens(client) == {2: 3}
    assert worker.known.stream.acks.acknowledged == 1  # the second waits for its client to acknowledge it


def test_document_lists_the_steps_of_the_main_path() -> None:
    code = re.findall(r"# (\d\. [^.:;,(]+)[.:;,(]", inspect.getsource(Intake.process))
    document = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert len(code) > 7
    assert code == re.findall(r"^(\d\. [^.:;,(\n]+?)(?: \(|[.:;,\n])", document, re.MULTILINE)
