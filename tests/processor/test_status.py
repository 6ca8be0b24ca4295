"""The status frame: what a client hears of the processor and its workers, and how often."""

from tests.in_process.bench import Bench, BenchClient
from tests.in_process.builders import generate_of
from tokenbus.bus import Outcome
from tokenbus.processor.status import STATUS_BURST_SECONDS, STATUS_INTERVAL
from tokenbus.testing import row_shapes
from tokenbus_contracts.generated.client_pb2 import ClientFrame, ProcessorStatus, StatusRequest
from tokenbus_contracts.generated.control_pb2 import ControlAnswer, EngineState
from tokenbus_contracts.generated.request_pb2 import RequestEvent
from tokenbus_contracts.generated.stream_pb2 import WorkerRole

ASK = ClientFrame(status=StatusRequest())


def statuses(client: BenchClient) -> list[ProcessorStatus]:
    heard = [each.frame for each in client.heard() if each.body == "status"]
    assert not any(frame.number for frame in heard)
    return [frame.status for frame in heard]


def answer_to(client: BenchClient) -> ProcessorStatus:
    client.say(ASK)
    (status,) = statuses(client)
    return status


def test_status_counts_requests_and_describes_each_worker() -> None:
    bench = Bench()
    worker, client = bench.worker("here", role=WorkerRole.WORKER_ROLE_MIXED, model="m"), bench.client()
    client.ask(generate_of(1))
    bench.worker("away").known.peer = None
    worker.publish(row_shapes([1], tokens=2))  # which verified one draft token
    status = answer_to(client)
    assert (status.open_requests, status.connected_clients, status.tokens, status.steps) == (1, 1, 2, 1)
    found = [(each.worker_id, each.is_connected, each.open_requests, each.tokens) for each in status.workers]
    assert found == [("here", True, 1, 2), ("away", False, 0, 0)]
    first = status.workers[0]
    assert (first.epoch, first.role, first.model) == (worker.epoch, WorkerRole.WORKER_ROLE_MIXED, "m")
    assert (list(first.draft_tokens), list(first.accepted_tokens)) == ([1], [1])


def test_status_says_how_full_caches_are() -> None:
    bench = Bench()
    worker, client = bench.worker("a"), bench.client()
    for beat, wanted in (({"kv_cache_permille": 250}, 250), ({"kv_cache_permille": 0}, 0), ({}, None)):
        worker.beat(**beat)
        bench.advance(STATUS_INTERVAL)
        (status,) = answer_to(client).workers
        assert (status.kv_cache_permille if status.HasField("kv_cache_permille") else None) == wanted


def test_status_names_the_adapters_of_workers_as_far_as_there_is_room() -> None:
    bench = Bench()
    bench.worker("a", lora_adapters=["x", "y"])
    client = bench.client()
    status = answer_to(client)
    assert [list(each.lora_adapters) for each in status.workers] == [["x", "y"]]
    many = [f"{number:03}".rjust(256, "n") for number in range(256)]
    for worker_id in "bcd":
        bench.worker(worker_id, lora_adapters=many)
    bench.advance(STATUS_INTERVAL)
    status = answer_to(client)
    named = [list(each.lora_adapters) for each in status.workers]
    assert named[:2] == [["x", "y"], many]
    assert named[2] == many[: len(named[2])]
    assert (len(named[2]) > 200, named[3]) == (True, [])


def test_status_has_the_probes_of_each_tokenizer_once() -> None:
    bench = Bench()
    for worker_id, digest in (("a", 1), ("b", 1), ("c", 2)):
        bench.worker(worker_id, tokenizer_digest=digest, tokenizer_probes=[digest, 7])
    client = bench.client()
    status = answer_to(client)
    assert [list(each.tokenizer_probes) for each in status.workers] == [[1, 7], [], [2, 7]]


def test_requests_that_come_too_soon_share_the_next_answer() -> None:
    bench = Bench()
    client = bench.client()
    for _ in range(1000):
        client.say(ASK)
    assert len(statuses(client)) - round(STATUS_BURST_SECONDS / STATUS_INTERVAL) in (0, 1)
    bench.advance(STATUS_INTERVAL)
    assert len(statuses(client)) == 1
    bench.advance(STATUS_INTERVAL)
    assert statuses(client) == []


def test_client_that_asks_now_and_then_does_not_wait() -> None:
    bench = Bench()
    client = bench.client()
    for _ in range(5):
        client.say(ASK)
        assert len(statuses(client)) == 1
        bench.clock.advance(STATUS_INTERVAL / 10)


def test_adapters_are_named_as_soon_as_a_worker_has_them() -> None:
    bench = Bench()
    worker, client = bench.worker(takes_control=True), bench.client()
    for number, names in enumerate((["x"], ["x", "y"], []), 1):
        state = EngineState(lora_adapters=names)
        worker._event(
            RequestEvent(sequence=worker.sequence + 1, control_answer=ControlAnswer(control_key=number, state=state))
        )
        client.say(ASK)
        assert [list(each.lora_adapters) for status in statuses(client) for each in status.workers] == [names]


def test_clients_share_one_report() -> None:
    bench = Bench()
    first, second = bench.client(5), bench.client(6)
    first.say(ASK)
    bench.worker()
    second.say(ASK)
    assert [len(status.workers) for client in (first, second) for status in statuses(client)] == [0, 0]
    bench.clock.advance(STATUS_INTERVAL)
    first.say(ASK)
    assert [len(status.workers) for status in statuses(first)] == [1]


def test_answer_that_finds_no_room_is_sent_later() -> None:
    bench = Bench()
    client = bench.client()
    bench.outcomes[client.peer] = Outcome.FULL
    client.say(ASK)
    assert statuses(client) == []
    del bench.outcomes[client.peer]
    bench.advance(0.01)
    assert len(statuses(client)) == 1


def test_more_workers_than_the_frame_takes_are_left_out() -> None:
    bench = Bench({"processor.max_workers": 2000})
    for number in range(1030):
        bench.worker(f"worker-{number}").known.peer = None
    bench.worker("last")
    client = bench.client()
    status = answer_to(client)
    assert len(status.workers) == 1024
    assert status.workers[0].worker_id == "last"
