"""Dispatch: which worker a new request goes to, and which requests go to none."""

from random import Random
from typing import Any

import pytest

from tests.in_process.bench import Bench, BenchWorker
from tests.in_process.builders import generate_of
from tests.processor.serving import serving
from tokenbus.bus import Outcome
from tokenbus.processor.requests import NO_OWNER
from tokenbus.processor.workers import Worker
from tokenbus.testing import RowShape
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated import request_pb2 as pb
from tokenbus_contracts.generated.control_pb2 import ControlAnswer, EngineState
from tokenbus_contracts.generated.stream_pb2 import Goodbye, GoodbyeReason, WorkerFrame, WorkerRole

ANY = pb.ContinuationPolicy.CONTINUATION_POLICY_UNSPECIFIED
SAME_WEIGHTS = pb.ContinuationPolicy.CONTINUATION_POLICY_SAME_WEIGHTS


def submit(bench: Bench, generate: pb.Generate) -> pb.RequestError | None:
    request = bench.core.dispatch.submit(generate, 1, NO_OWNER)
    return request if isinstance(request, pb.RequestError) else None


def keys(worker: BenchWorker) -> list[int]:
    return [frame.generate.request_id for frame in worker.heard() if frame.HasField("generate")]


def code(error: pb.RequestError | None) -> int:
    assert error is not None
    return error.code


def test_request_goes_to_the_worker_with_the_fewest() -> None:
    bench = Bench()
    first, second = bench.worker("a"), bench.worker("b")
    for key in range(1, 5):
        assert submit(bench, generate_of(key)) is None
    assert (keys(first), keys(second)) == ([1, 3], [2, 4])
    second.publish([RowShape(2, 0, 1, RowStatus.FINISHED_STOP), RowShape(4, 0, 1, RowStatus.FINISHED_STOP)])
    for key in (5, 6):
        submit(bench, generate_of(key))
    assert (keys(first), keys(second)) == ([], [5, 6])


def test_workers_with_equally_many_take_turns() -> None:
    bench = Bench()
    workers = [bench.worker(name) for name in "abc"]
    given = []
    for key in range(1, 7):
        submit(bench, generate_of(key))
        (worker,) = (each for each in workers if key in keys(each))
        given.append(worker.worker_id)
        worker.publish([RowShape(key, 0, 1, RowStatus.FINISHED_STOP)])
    assert given == ["a", "b", "c", "a", "b", "c"]


def test_requests_of_one_client_go_to_few_workers() -> None:
    """After some time each worker has mostly one client's requests, and never an eighth more than another."""
    bench, random = Bench(), Random(1)  # noqa: S311 - it picks test data
    workers = [bench.worker(name, max_requests=128) for name in "ab"]
    clients = [bench.client(session, window_frames=4096) for session in (1, 2)]
    owners: dict[int, int] = {}
    running: list[list[int]] = [[], []]
    for key in range(1, 801):
        if key > 128:  # as many as it begins with run from then on
            place = random.choices((0, 1), [len(each) for each in running])[0]
            ended = running[place].pop(random.randrange(len(running[place])))
            workers[place].publish([RowShape(ended, 0, 1, RowStatus.FINISHED_STOP)])
        owners[key] = random.randrange(2)
        clients[owners[key]].ask(generate_of(key))
        for client in clients:
            client.heard()
            client.ack()
        least = min(map(len, running))
        for place, worker in enumerate(workers):
            if keys(worker):
                assert len(running[place]) <= least + least // 8
                running[place].append(key)
    assert sum(map(len, running)) == 128
    shares = [sum(owners[key] for key in some) / len(some) for some in running]
    assert max(shares) - min(shares) > 0.6


def test_worker_that_leaves_is_given_nothing_more() -> None:
    bench = Bench()
    leaving, staying = bench.worker("a"), bench.worker("b", max_requests=2)
    submit(bench, generate_of(1))
    leaving.beat(takes_no_more=True)
    leaving.beat()  # it does not change its mind
    assert [submit(bench, generate_of(key)) for key in (2, 3)] == [None, None]
    assert (keys(leaving), keys(staying)) == ([1], [2, 3])
    error = submit(bench, generate_of(4))
    assert code(error) == pb.ErrorCode.ERROR_CODE_OVERLOADED
    leaving.publish([RowShape(1, 0, 1)])
    assert bench.core.registry.table.get(1) is not None


def test_begun_requests_of_a_worker_that_leaves_are_continued_where_others_like_it_have_room() -> None:
    bench = Bench()
    leaving, client = bench.worker("a", weight_version=5, continues_requests=True), bench.client()
    client.ask(generate_of(1, continuation_policy=ANY, sampling=pb.SamplingParameters(presence_penalty=0.5)))
    for key in (2, 3, 4):
        client.ask(generate_of(key, continuation_policy=ANY))
    for key in (1, 2, 3):
        leaving.admit(key)
    client.heard()
    leaving.beat(takes_no_more=True)
    bench.worker("other", weight_version=6)
    bench.advance(0.1)
    assert client.errors() == {}
    bench.worker("like it", weight_version=5, max_requests=1)
    bench.advance(0.1)
    assert client.errors() == {2: pb.ErrorCode.ERROR_CODE_UNKNOWN_REQUEST}
    assert [frame.abort.request_id for frame in leaving.heard() if frame.HasField("abort")] == [2]


def test_later_turn_waits_for_no_stalled_worker_where_its_client_knows_other_processors() -> None:
    bench = Bench()
    worker, client = bench.worker(), bench.client(wants_room=True)
    bench.peers.gone.add(worker.peer)
    bench.advance(0.1)
    client.ask(generate_of(1))
    client.ask(generate_of(2, first_request_id=1, continuation=pb.Continuation(turn=1)))
    assert client.errors() == {2: pb.ErrorCode.ERROR_CODE_OVERLOADED}
    assert bench.core.dispatch.waiting == 1


def test_request_that_a_stopping_worker_refuses_goes_to_another() -> None:
    bench = Bench()
    leaving, staying = bench.worker("a"), bench.worker("b")
    for key in range(1, 5):
        submit(bench, generate_of(key))
    leaving.admit(1)
    for key in (1, 3):
        leaving.fail(pb.RequestError(request_id=key, code=pb.ErrorCode.ERROR_CODE_OVERLOADED, message="it stops"))
    assert (keys(leaving), keys(staying)) == ([1, 3], [2, 4, 3])
    assert bench.core.registry.table.get(1) is None
    assert bench.core.registry.counts.failed == {"overloaded": 1}
    submit(bench, generate_of(5))
    assert keys(staying) == [5], "the one that refuses is sent no more"


def test_request_that_the_last_worker_refuses_ends() -> None:
    bench, worker, client = serving(1)
    worker.fail(pb.RequestError(request_id=1, code=pb.ErrorCode.ERROR_CODE_OVERLOADED, message="it stops"))
    bench.advance(0.1)
    assert client.errors() == {1: pb.ErrorCode.ERROR_CODE_OVERLOADED}


def test_worker_takes_exactly_as_many_as_it_says() -> None:
    bench = Bench()
    worker = bench.worker(max_requests=2)
    assert [submit(bench, generate_of(key)) for key in (1, 2)] == [None, None]
    error = submit(bench, generate_of(3))
    assert code(error) == pb.ErrorCode.ERROR_CODE_OVERLOADED
    assert error is not None
    assert error.retry_after_ms > 0
    assert keys(worker) == [1, 2]
    assert bench.core.dispatch.refused == {"overloaded": 1}


@pytest.mark.parametrize(
    "hello",
    [
        {"model": "mine", "role": WorkerRole.WORKER_ROLE_DECODE},
        {"model": "mine", "max_requests": 0},
        {"model": "other"},
        {"model": "mine", "tp_rank": 1},
    ],
    ids=["decodes only", "takes none", "another model", "another rank"],
)
def test_worker_that_does_not_serve_a_request_is_not_asked(hello: dict[str, Any]) -> None:
    """Workers that only decode, take none, serve another model or are another rank are no choice (case 6)."""
    bench = Bench()
    bench.worker(**hello)
    assert code(submit(bench, generate_of(1, model="mine"))) == pb.ErrorCode.ERROR_CODE_NO_WORKER
    bench.worker("b", model="mine")
    assert submit(bench, generate_of(1, model="mine")) is None
    assert submit(bench, generate_of(2, model="")) is None


def test_open_key_is_refused_and_an_ended_one_is_not() -> None:
    bench = Bench()
    worker = bench.worker()
    submit(bench, generate_of(1))
    assert code(submit(bench, generate_of(1))) == pb.ErrorCode.ERROR_CODE_DUPLICATE_REQUEST
    worker.publish([RowShape(1, 0, 1, RowStatus.FINISHED_STOP)])
    assert submit(bench, generate_of(1)) is None


def test_full_table_refuses() -> None:
    bench = Bench({"processor.max_requests": 1})
    bench.worker()
    assert submit(bench, generate_of(1)) is None
    assert code(submit(bench, generate_of(2))) == pb.ErrorCode.ERROR_CODE_OVERLOADED


@pytest.mark.parametrize(
    ("request_fields", "is_taken"),
    [
        ({"top_logprobs": 20}, True),
        ({"top_logprobs": 21}, False),
        ({"sampling": pb.SamplingParameters(top_p=0.0)}, False),
        ({"sampling": pb.SamplingParameters(top_p=0.001)}, True),
        ({"sampling": pb.SamplingParameters(repetition_penalty=0.0)}, False),
        ({"sampling": pb.SamplingParameters(repetition_penalty=0.5)}, True),
        ({"sampling": pb.SamplingParameters(max_tokens=4, min_tokens=5)}, False),
        ({"sampling": pb.SamplingParameters(max_tokens=4, min_tokens=4)}, True),
        ({"sampling": pb.SamplingParameters(min_tokens=4)}, True),
    ],
)
def test_request_that_is_wrong_in_itself_is_refused(request_fields: dict[str, Any], *, is_taken: bool) -> None:
    bench = Bench()
    bench.worker()
    error = submit(bench, generate_of(1, **request_fields))
    assert (error is None) is is_taken
    if error is not None:
        assert error.code == pb.ErrorCode.ERROR_CODE_INVALID_REQUEST


def test_worker_of_another_tokenizer_is_not_sent_a_request() -> None:
    bench = Bench()
    other = bench.worker("a", tokenizer_digest=7)
    refused = submit(bench, generate_of(1, tokenizer_digest=8))
    assert refused is not None
    assert (refused.code, refused.message) == (
        pb.ErrorCode.ERROR_CODE_NO_WORKER,
        "tokenizer_digest: the digest of a worker's tokenizer (a has 0000000000000007), got 0000000000000008",
    )
    for key, digest in ((2, 0), (3, 7)):
        assert submit(bench, generate_of(key, tokenizer_digest=digest)) is None
    unknown = bench.worker("b")
    for key in (4, 5):
        assert submit(bench, generate_of(key, tokenizer_digest=8)) is None
    assert (keys(other), keys(unknown)) == ([2, 3], [4, 5])


def test_tokens_are_continued_with_their_weights_alone_if_the_client_wants_that() -> None:
    """A request that no worker can go on with does not wait: a worker's weights do not become older."""
    bench = Bench()
    bench.core.begin(bench.clock.now())
    worker = bench.worker("a", weight_version=2, takes_control=True)

    def ask(key: int, version: int) -> pb.RequestError | None:
        continuation = pb.Continuation(token_ids=[1], turn=1, weight_version=version)
        return submit(bench, generate_of(key, continuation_policy=SAME_WEIGHTS, continuation=continuation))

    assert (ask(1, 2), keys(worker)) == (None, [1])
    refused = ask(2, 3)
    assert refused is not None
    assert (refused.code, refused.message) == (
        pb.ErrorCode.ERROR_CODE_NO_WORKER,
        "continuation.weight_version: the version of a worker's weights (a has 2), got 3",
    )
    answer = ControlAnswer(control_key=7, state=EngineState(weight_version=3))
    worker._event(pb.RequestEvent(sequence=worker.sequence + 1, control_answer=answer))
    assert (ask(3, 3), keys(worker)) == (None, [3])
    assert submit(bench, generate_of(4, continuation=pb.Continuation(token_ids=[1], turn=1))) is None


def test_adapter_decides_which_worker_a_request_goes_to() -> None:
    bench = Bench()
    plain, first = bench.worker("a"), bench.worker("b", lora_adapters=["x", "y"])
    second = bench.worker("c", model="m", lora_adapters=["y", "z"])

    def ask(key: int, adapter: str, model: str = "") -> pb.RequestError | None:
        return submit(bench, generate_of(key, model=model, sampling=pb.SamplingParameters(lora_adapter=adapter)))

    for key, adapter in enumerate(["x", "x", "z", ""], 1):
        assert ask(key, adapter) is None
    assert ask(5, "y", "m") is None
    assert (keys(plain), keys(first), keys(second)) == ([4], [1, 2], [3, 5])
    for adapter, model, line in (
        ("w", "", "sampling.lora_adapter: one of x, y, z, got 'w'"),
        ("x", "m", "sampling.lora_adapter: one of y, z, got 'x'"),
        ("x", "n", "no worker serves model 'n' with a LoRA adapter, got 'x'"),
    ):
        error = ask(6, adapter, model)
        assert error is not None
        assert (error.code, error.message) == (pb.ErrorCode.ERROR_CODE_NO_WORKER, line)


def test_request_that_waits_for_an_adapter_keeps_no_other_one() -> None:
    bench = Bench({"bus.heartbeat_timeout_ms": 3000})
    bench.core.begin(bench.clock.now())
    client = bench.client()
    client.ask(generate_of(1, sampling=pb.SamplingParameters(lora_adapter="x")))
    client.ask(generate_of(2))
    plain = bench.worker("a")
    assert (set(keys(plain)), bench.core.dispatch.waiting) == ({2}, 1)
    assert set(keys(bench.worker("b", lora_adapters=["x"]))) == {1}


def test_request_that_could_not_be_told_is_told_later() -> None:
    bench = Bench()
    worker = bench.worker()
    bench.outcomes[worker.peer] = Outcome.FULL
    assert submit(bench, generate_of(1)) is None
    bench.outcomes.clear()
    worker.heard()
    worker.say_hello()
    assert keys(worker) == [1]


def test_requests_wait_for_workers_after_a_start() -> None:
    bench = Bench({"bus.heartbeat_timeout_ms": 3000})
    assert code(submit(bench, generate_of(1))) == pb.ErrorCode.ERROR_CODE_NO_WORKER
    bench.core.begin(bench.clock.now())
    client = bench.client()
    client.ask(generate_of(1))
    client.ask(generate_of(2))
    assert bench.core.dispatch.waiting == 2
    worker = bench.worker(max_requests=1)
    assert set(keys(worker)) == {1}
    bench.pass_time(2.99, worker, client)
    assert client.errors() == {}
    bench.pass_time(0.01, worker, client)
    assert client.errors() == {2: pb.ErrorCode.ERROR_CODE_OVERLOADED}
    assert bench.core.dispatch.waiting == 0


def test_own_standstill_is_no_time_in_which_a_worker_could_come() -> None:
    bench = Bench({"bus.heartbeat_timeout_ms": 3000})
    bench.core.begin(bench.clock.now())
    client = bench.client()
    client.ask(generate_of(1))
    bench.clock.advance(4.0)
    bench.core.extend_deadlines(3.0, bench.clock.now())
    bench.core.tick(bench.clock.now())
    client.ask(generate_of(2))
    assert client.errors() == {}
    assert set(keys(bench.worker())) == {1, 2}


def test_workers_are_looked_at_once_for_all_that_ask_for_what_none_offers() -> None:
    """A client that makes up a tokenizer's digest, a model or an adapter for each request costs no more than one."""
    bench = Bench()
    bench.core.begin(bench.clock.now())
    client, looks = bench.client(), 0
    bench.worker(tokenizer_digest=1)

    class Workers(dict[str, Worker]):
        def values(self) -> Any:  # noqa: ANN401 - a view of a dict
            nonlocal looks
            looks += 1
            return super().values()

    def look() -> int:
        nonlocal looks
        looks = 0
        bench.core.dispatch.dispatch_waiting()
        return looks

    bench.core.workers.by_id = Workers(bench.core.workers.by_id)
    client.ask(generate_of(1, tokenizer_digest=2))
    one = look()
    for key in range(2, 50):
        made_up = ({"tokenizer_digest": key}, {"model": str(key)}, {"sampling": {"lora_adapter": str(key)}})[key % 3]
        client.ask(generate_of(key, **made_up))
    assert bench.core.dispatch.waiting == 49
    assert look() <= one + 3 * 2


def test_new_request_waits_for_a_worker_that_was_lost() -> None:
    bench = Bench()
    leaving = bench.worker("a")
    client = bench.client()
    leaving.say(WorkerFrame(goodbye=Goodbye(reason=GoodbyeReason.GOODBYE_REASON_STOPPED)))
    client.ask(generate_of(1))
    assert client.errors() == {}
    assert set(keys(bench.worker("b"))) == {1}
