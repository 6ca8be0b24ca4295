"""How a request changes hands between two streams, as the processor sees it."""

from typing import Any

import pytest

from tests.in_process.bench import Bench, BenchClient, BenchWorker
from tests.in_process.builders import generate_of
from tokenbus.bus.handoff_tickets import is_ticket_for
from tokenbus.bus.transport import ANONYMOUS
from tokenbus.testing import RowShape, row_shapes
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Resume
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate, RequestError
from tokenbus_contracts.generated.stream_pb2 import Goodbye, GoodbyeReason, WorkerFrame, WorkerRole

ADDRESS = "memory://decode"
KEY = b"k" * 32
FIRST = [RowShape(1, 0, 1, RowStatus.HANDED_OFF)]
HANDOFF, LOST = ErrorCode.ERROR_CODE_HANDOFF, ErrorCode.ERROR_CODE_WORKER_LOST


def prefill(bench: Bench, name: str = "p", **hello: Any) -> BenchWorker:  # noqa: ANN401 - as the message has them
    return bench.worker(name, role=WorkerRole.WORKER_ROLE_PREFILL, **hello)


def decode(bench: Bench, name: str = "d", **hello: Any) -> BenchWorker:  # noqa: ANN401 - as the message has them
    """Return a decode worker that said hello, and takes hand-offs."""
    said: dict[str, Any] = {"role": WorkerRole.WORKER_ROLE_DECODE, "handoff_address": ADDRESS}
    return bench.worker(name, **(said | hello))


def begun() -> tuple[Bench, BenchClient, BenchWorker, BenchWorker]:
    """Return a client whose request 1 a prefill worker has, and the decode worker that is to go on with it."""
    bench = Bench()
    client, first, second = bench.client(), prefill(bench), decode(bench)
    client.ask(generate_of(1))
    return bench, client, first, second


def told(worker: BenchWorker) -> dict[int, str]:
    """Return the requests that a worker was handed since the last time, and where it is to hand them off to."""
    return {
        frame.generate.request_key: frame.generate.handoff_address
        for frame in worker.heard()
        if frame.HasField("generate")
    }


def aborted(worker: BenchWorker) -> list[int]:
    """Return the requests whose abort was sent to a worker since the last call."""
    return [frame.abort.request_key for frame in worker.heard() if frame.HasField("abort")]


def test_prefill_worker_is_told_who_goes_on() -> None:
    bench = Bench()
    client, first = bench.client(), prefill(bench)
    decode(bench, "d1", handoff_address="memory://one")
    decode(bench, "d2", handoff_address="memory://two")
    for key in range(1, 5):
        client.ask(generate_of(key, handoff_address="memory://mine"))  # it is not the client's to say
    addresses = told(first)
    assert sorted(addresses) == [1, 2, 3, 4]
    assert sorted(addresses.values()) == ["memory://one"] * 2 + ["memory://two"] * 2


def given(worker: BenchWorker) -> list[Generate]:
    """Return the requests that a worker was handed since the last time."""
    return [frame.generate for frame in worker.heard() if frame.HasField("generate")]


def void(worker: BenchWorker) -> list[bytes]:
    """Return the tickets that a decode worker was told are void, since the last time."""
    return [frame.void_ticket.ticket for frame in worker.heard() if frame.HasField("void_ticket")]


def test_each_request_has_a_ticket_of_its_own() -> None:
    """A ticket is made for a request and the prefill worker that gets it, with the key of the decode worker's hello."""
    bench = Bench()
    client, first, second = bench.client(), prefill(bench), prefill(bench, "q")
    decode(bench, handoff_key=KEY)
    for key in (1, 2):
        client.ask(generate_of(key))
    mine, other = given(first)[0], given(second)[0]
    assert is_ticket_for(mine.handoff_ticket, KEY, mine, "p", ANONYMOUS)
    assert not is_ticket_for(mine.handoff_ticket, KEY, mine, "q", ANONYMOUS)
    assert not is_ticket_for(mine.handoff_ticket, KEY, other, "p", ANONYMOUS)
    assert mine.deadline_unix_ms


@pytest.mark.parametrize("end", ["finishes", "fails", "refuses", "goodbye", "goodbye in a group", "deadline"])
def test_ticket_of_a_request_that_left_its_prefill_worker_is_void(end: str) -> None:
    bench = Bench()
    client, first = bench.client(), prefill(bench, processors=int(end == "goodbye in a group"))
    second = decode(bench, handoff_key=KEY)
    client.ask(generate_of(1, deadline_ms=1000))
    ticket = given(first)[0].handoff_ticket
    match end:
        case "finishes":
            first.publish([RowShape(1, 0, 1, RowStatus.FINISHED_STOP)])
        case "fails":
            first.fail(RequestError(request_key=1, code=ErrorCode.ERROR_CODE_ENGINE, message="no"))
        case "refuses":
            other = prefill(bench, "q")
            first.fail(RequestError(request_key=1, code=ErrorCode.ERROR_CODE_OVERLOADED, message="it stops"))
            assert given(other)[0].handoff_ticket != ticket
        case "deadline":
            bench.pass_time(1.1, first, second, client)
        case _:
            first.say(WorkerFrame(goodbye=Goodbye(reason=GoodbyeReason.GOODBYE_REASON_STOPPED)))
    assert void(second) == [ticket]


@pytest.mark.parametrize("hello", [{"model": "other"}, {"tp_rank": 1}, {"role": WorkerRole.WORKER_ROLE_MIXED}])
def test_prefill_worker_without_a_decode_worker_gets_no_request(hello: dict[str, Any]) -> None:
    bench = Bench()
    client, first = bench.client(), prefill(bench)
    decode(bench, **hello)
    client.ask(generate_of(1))
    assert told(first) == {}
    decode(bench, "d2")
    client.ask(generate_of(2))
    assert told(first) == {2: ADDRESS}


def test_prefill_worker_that_stays_alone_is_sent_to_the_next_processor() -> None:
    bench = Bench()
    alone, single = prefill(bench, "a", processors=2), prefill(bench, "b")
    paired, second = prefill(bench, "c", processors=2, model="m"), decode(bench, model="m")
    everyone = (alone, single, paired, second)
    bench.pass_time(bench.settings.bus.heartbeat_timeout_ms / 1000 + 1.5, *everyone)
    assert [each for each in everyone if each.worker_id not in bench.core.workers.by_id] == [alone]


@pytest.mark.parametrize("order", ["row, admitted", "admitted, row"])
def test_decode_worker_has_a_request_once_it_says_so(order: str) -> None:
    """In whichever order the two streams report it: when the decode worker dies its requests end at once."""
    bench, client, first, second = begun()
    if order.startswith("row"):
        first.publish(FIRST)
        second.admit(1)
    else:
        second.admit(1)
        first.publish(FIRST)
    client.heard()
    bench.pass_time(60, first, second, client)  # it takes its time with the first step
    assert client.errors() == {}
    bench.pass_time(60, first, client)
    assert client.errors() == {1: LOST}


@pytest.mark.parametrize(("is_admitted", "is_begun"), [(True, False), (False, True), (True, True)])
def test_decode_worker_that_dies_before_it_goes_on_ends_its_requests(*, is_admitted: bool, is_begun: bool) -> None:
    """What a decode worker was to go on with ends with an error that names it, whatever had come of it (case 27)."""
    bench, client, first, second = begun()
    if is_begun:
        first.publish(FIRST)
    if is_admitted:
        second.admit(1)
    client.heard()
    bench.pass_time(4, first, client)
    assert client.errors() == {1: LOST if is_admitted and is_begun else HANDOFF}


def test_decode_worker_that_dies_before_anything_went_there_ends_nothing() -> None:
    bench, client, first, _ = begun()
    bench.pass_time(4, first, client)
    first.publish(FIRST)
    assert client.errors() == {}
    first.fail(RequestError(request_key=1, code=HANDOFF, message="the decode worker refused it: no room"))
    (heard,) = (heard for heard in client.heard() if heard.body == "error")
    assert (heard.frame.error.code, heard.frame.error.emitted_tokens) == (HANDOFF, 1)
    assert "refused it: no room" in heard.frame.error.message


def test_only_who_let_go_says_that_nobody_took_it() -> None:
    """Another worker's word about a request that was handed off counts for nothing, nor does it once it goes on."""
    bench, client, first, second = begun()
    other = prefill(bench, "q")
    first.publish(FIRST)
    error = RequestError(request_key=1, code=HANDOFF, message="no")
    other.fail(error)
    second.admit(1)
    first.fail(error)
    assert client.errors() == {}
    second.publish(row_shapes([1], position=1))
    assert [heard.batches[0].positions.tolist() for heard in client.outputs()] == [[1]]


def test_abort_while_nobody_has_it_reaches_who_takes_it() -> None:
    bench, _, first, second = begun()
    first.publish(FIRST)
    bench.core.registry.abort(1)
    assert aborted(second) == []
    second.admit(1)
    assert aborted(second) == [1]


def test_request_that_has_ended_is_taken_over_by_nobody() -> None:
    """A decode worker that admits an ended request is sent an abort; an unknown request may yet come."""
    _, _, first, second = begun()
    first.publish([RowShape(1, 0, 1, RowStatus.FINISHED_STOP)])
    second.admit(1)
    second.admit(99)
    assert aborted(second) == [1]


def test_restarted_processor_gives_each_request_its_rows_in_order() -> None:
    """Rows of two streams that waited go to their client in each request's order, whatever the streams' numbers are.

    The decode worker's stream is short and the prefill worker's is long, so the numbers say the opposite.
    """
    bench = Bench()
    first = prefill(bench, first_sequence=50, next_sequence=52)
    first.sequence = 49
    second = decode(bench, first_sequence=2, next_sequence=6, request_keys=[1, 2])
    second.sequence = 1
    client = bench.client()
    second.admit(1)
    second.publish([RowShape(1, 1, 1)])
    first.publish([RowShape(1, 0, 1, RowStatus.HANDED_OFF)])
    first.publish([RowShape(2, 0, 1, RowStatus.HANDED_OFF)])
    second.publish(row_shapes([1, 2], position=2)[:1] + row_shapes([2], position=1))
    second.publish(row_shapes([1], position=3) + row_shapes([2], position=2))
    bench.put_off()
    for key in (1, 2):
        client.say(ClientFrame(resume=Resume(request_key=key)))
    bench.run_soon()
    came: dict[int, list[int]] = {1: [], 2: []}
    outputs = client.outputs()
    for heard in outputs:
        for row in heard.batches[0].rows():
            came[row.key].append(row.position)
    assert came == {1: [0, 1, 2, 3], 2: [0, 1, 2]}
    assert len(outputs) == 5


def test_error_of_who_goes_on_ends_a_request_before_the_other_let_go() -> None:
    """A decode worker's error that comes before the prefill worker's last row ends the request, there too (case 27)."""
    _, client, first, second = begun()
    second.admit(1)
    first.heard()
    second.fail(RequestError(request_key=1, code=ErrorCode.ERROR_CODE_ENGINE, message="no"))
    assert client.errors() == {1: ErrorCode.ERROR_CODE_ENGINE}
    assert aborted(first) == [1]


def test_request_that_ends_is_ended_at_everybody_who_works_on_it() -> None:
    """When the prefill worker is lost before its last row, the decode worker that has the request is sent an abort."""
    bench, client, _, second = begun()
    second.admit(1)
    second.heard()
    bench.pass_time(4, second, client)
    assert client.errors() == {1: LOST}
    assert aborted(second) == [1]


def test_claim_gives_a_hand_off_no_more_time() -> None:
    """A request handed off before its client came back ends if no worker continues it in time (case 27)."""
    bench = Bench({"processor.handoff_timeout_ms": 2000})
    first = prefill(bench, first_sequence=5, next_sequence=6)
    first.sequence = 4
    first.publish(FIRST)
    client = bench.client()
    client.say(ClientFrame(resume=Resume(request_key=1)))
    bench.pass_time(1.9, first, client)
    assert client.errors() == {}
    bench.pass_time(0.2, first, client)
    assert client.errors() == {1: HANDOFF}


def test_requests_that_a_decode_worker_claims_are_bounded() -> None:
    bench = Bench({"processor.max_requests": 4})
    second = decode(bench)
    for key in range(1, 9):
        second.admit(key)
    assert len(second.known.source.owners) == 4
