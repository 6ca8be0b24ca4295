"""A prefill worker begins a request, and the processor sends it on to a decode worker under the same id."""

from typing import Any

import pytest

from tests.in_process.bench import Bench, BenchClient, BenchWorker
from tests.in_process.builders import generate_of
from tokenbus.testing import RowShape, row_shapes
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Resume
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate, RequestError
from tokenbus_contracts.generated.stream_pb2 import Goodbye, GoodbyeReason, WorkerFrame, WorkerRole

FIRST = [RowShape(1, 0, 1, RowStatus.HANDED_OFF)]
LOST = ErrorCode.ERROR_CODE_WORKER_LOST


def prefill(bench: Bench, name: str = "p", **hello: Any) -> BenchWorker:  # noqa: ANN401 - as the message has them
    return bench.worker(name, role=WorkerRole.WORKER_ROLE_PREFILL, **hello)


def decode(bench: Bench, name: str = "d", **hello: Any) -> BenchWorker:  # noqa: ANN401 - as the message has them
    return bench.worker(name, **{"role": WorkerRole.WORKER_ROLE_DECODE, **hello})


def begun(generate: Generate | None = None) -> tuple[Bench, BenchClient, BenchWorker, BenchWorker]:
    bench = Bench()
    client, first, second = bench.client(), prefill(bench), decode(bench)
    client.ask(generate or generate_of(1))
    first.admit(1)
    return bench, client, first, second


def given(worker: BenchWorker) -> list[Generate]:
    return [frame.generate for frame in worker.heard() if frame.HasField("generate")]


def test_decode_worker_goes_on_behind_the_tokens_of_the_prefill_worker() -> None:
    asked = generate_of(1)
    asked.prompt_scoring.top_logprobs = 1
    _, client, first, second = begun(asked)
    assert given(second) == []
    first.prefilled(1, b"state")
    made = first.publish(FIRST)
    (sent,) = given(second)
    assert sent.continuation.token_ids == made.token_ids.tolist()
    assert sent.continuation.transfer_state == b"state"
    assert (sent.request_id, sent.tokens, sent.HasField("prompt_scoring")) == (1, asked.tokens, False)
    second.admit(1)
    second.publish(row_shapes([1], position=1, status=RowStatus.FINISHED_LENGTH))
    assert [heard.batches[0].positions.tolist() for heard in client.outputs()] == [[0], [1]]
    assert client.errors() == {}


def test_tokens_of_earlier_turns_come_first() -> None:
    asked = generate_of(1, 50)
    asked.continuation.token_ids.extend([7, 8])
    asked.continuation.turn = 3
    _, _, first, second = begun(asked)
    made = first.publish([RowShape(1, 2, 1, RowStatus.HANDED_OFF)])
    (sent,) = given(second)
    assert sent.continuation.token_ids == [7, 8, *made.token_ids.tolist()]
    assert (sent.continuation.turn, sent.continuation.transfer_state) == (3, b"")


def test_client_may_not_say_what_an_engine_goes_on_from() -> None:
    bench = Bench()
    client, first = bench.client(), bench.worker()
    asked = generate_of(1, 50)
    asked.continuation.token_ids.append(7)
    asked.continuation.transfer_state = b"state"
    client.ask(asked)
    (error,) = [heard.frame.error for heard in client.heard() if heard.body == "error"]
    assert error.code == ErrorCode.ERROR_CODE_INVALID_REQUEST
    assert error.message == "continuation.transfer_state: none from a client, got 5 bytes"
    assert given(first) == []


@pytest.mark.parametrize("is_stopping", [False, True])
@pytest.mark.parametrize("has_another", [False, True])
def test_another_decode_worker_takes_the_place_of_one_that_leaves(*, is_stopping: bool, has_another: bool) -> None:
    bench, client, first, second = begun()
    if is_stopping:
        second.beat(takes_no_more=True)
    else:
        second.say(WorkerFrame(goodbye=Goodbye(reason=GoodbyeReason.GOODBYE_REASON_STOPPED)))
    third = decode(bench, "e") if has_another else None
    first.publish(FIRST)
    assert given(second) == []
    assert client.errors() == ({} if has_another else {1: LOST})
    assert third is None or [sent.request_id for sent in given(third)] == [1]


def test_request_of_a_lost_decode_worker_ends() -> None:
    bench, client, first, _ = begun()
    first.publish(FIRST)
    client.heard()
    bench.pass_time(4, first, client)
    assert client.errors() == {1: LOST}


def test_request_that_a_leaving_decode_worker_refuses_begins_anew_without_its_state() -> None:
    bench, client, first, second = begun()
    first.prefilled(1, b"state")
    made = first.publish(FIRST)
    decode(bench, "e")
    given(first)
    second.fail(RequestError(request_id=1, code=ErrorCode.ERROR_CODE_OVERLOADED, message="it stops"))
    (sent,) = given(first)
    assert sent.continuation.token_ids == made.token_ids.tolist()
    assert sent.continuation.transfer_state == b""
    assert client.errors() == {}


def test_abort_that_crosses_the_end_of_the_prefill_reaches_the_decode_worker() -> None:
    bench, _, first, second = begun()
    bench.core.registry.abort(1)
    first.publish(FIRST)
    assert [body for body in second.heard_bodies() if body in ("generate", "abort")] == ["generate", "abort"]


def test_last_row_without_all_tokens_of_the_prefill_ends_the_request() -> None:
    _, client, first, second = begun()
    first.publish(row_shapes([1]))
    first.publish([RowShape(1, 1, 1, RowStatus.HANDED_OFF)])
    assert client.errors() == {1: LOST}
    assert given(second) == []


def test_restarted_processor_ends_a_request_whose_prefill_comes_again() -> None:
    """It has no more of the request than these rows: its client has them, and then the error."""
    bench = Bench()
    first = prefill(bench, first_sequence=5, next_sequence=6)
    second = decode(bench)
    first.sequence = 4
    first.publish(FIRST)
    client = bench.client()
    client.say(ClientFrame(resume=Resume(request_id=1)))
    assert [heard.body for heard in client.heard()][-2:] == ["outputs", "error"]
    assert given(second) == []


def test_room_at_the_decode_worker_is_reserved_from_the_beginning() -> None:
    bench = Bench()
    client, first, second = bench.client(), prefill(bench), decode(bench, max_requests=1)
    for key in (1, 2):
        client.ask(generate_of(key))
    assert [sent.request_id for sent in given(first)] == [1]
    assert client.errors() == {2: ErrorCode.ERROR_CODE_OVERLOADED}
    first.publish(FIRST)
    client.ask(generate_of(3))
    assert client.errors() == {3: ErrorCode.ERROR_CODE_OVERLOADED}
    second.publish(row_shapes([1], position=1, status=RowStatus.FINISHED_LENGTH))
    client.ask(generate_of(4))
    assert [sent.request_id for sent in given(first)] == [4]


@pytest.mark.parametrize("hello", [{"model": "other"}, {"tp_rank": 1}, {"role": WorkerRole.WORKER_ROLE_MIXED}])
def test_prefill_worker_without_a_decode_worker_gets_no_request(hello: dict[str, Any]) -> None:
    bench = Bench()
    client, first = bench.client(), prefill(bench)
    decode(bench, **hello)
    client.ask(generate_of(1))
    assert given(first) == []
    decode(bench, "d2")
    client.ask(generate_of(2))
    assert [sent.request_id for sent in given(first)] == [2]


def test_prefill_worker_that_stays_alone_is_sent_to_the_next_processor() -> None:
    bench = Bench()
    alone, single = prefill(bench, "a", processors=2), prefill(bench, "b")
    paired, second = prefill(bench, "c", processors=2, model="m"), decode(bench, model="m")
    everyone = (alone, single, paired, second)
    bench.pass_time(bench.settings.bus.heartbeat_timeout_ms / 1000 + 1.5, *everyone)
    assert [each for each in everyone if each.worker_id not in bench.core.workers.by_id] == [alone]


def test_cached_tokens_are_those_of_the_prefill_worker() -> None:
    _, client, first, second = begun()
    first.publish(FIRST)
    second.admit(1, cached_tokens=0)
    told = [heard.frame.admitted for heard in client.heard() if heard.body == "admitted"]
    assert [(each.worker_id, each.HasField("cached_tokens")) for each in told] == [("p", False), ("d", False)]
